"""Priorities, policies, and what goes when a shard is full."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.steps.eviction import POLICIES, Live, capacity_of_a_shard, freshness, priority
from flows.steps.member import Member
from schemas.settings import Curate

SETTINGS = Curate(hard_bonus=0.25, freshness_weight=0.25, completion_bonus=0.1)
_ids = itertools.count()


def member(version: int = 1, reward: float = 1.0, status: str = "completed") -> Member:
    number = next(_ids)
    values: dict[str, object] = dict.fromkeys(Member._fields, 0)
    values |= {"trajectory_id": f"{number:032x}", "min_weight_version": version, "reward": reward, "status": status}
    return Member(**values)  # pyright: ignore[reportArgumentType]


def live(*entries: tuple[int, float], policy: str = "reward_priority") -> Live:
    """Entries of (bucket, priority), in order of arrival."""
    found = Live()
    for bucket, value in entries:
        found.add(member(bucket, value), bucket, value, POLICIES[policy])
    return found


def evicted(state: Live, capacity: int, share: float = 1.0) -> list[tuple[int, float]]:
    return [(m.min_weight_version, m.reward or 0.0) for m, _ in state.evict(capacity, share)]


def test_capacity_is_shared_by_the_shards() -> None:
    assert [capacity_of_a_shard(c) for c in (4096, 33, 2)] == [256, 2, 1]


def test_priority_sums_signal_hardness_freshness_and_completion() -> None:
    # |0 - 0.75| + 0.25 + 0.25 * 0.5 + 0.1
    assert priority(member(reward=0.0), 0.75, True, 0.5, SETTINGS) == pytest.approx(1.225)
    assert priority(member(reward=0.75, status="truncated"), 0.75, False, 0.0, SETTINGS) == 0


def test_freshness_falls_to_zero_above_the_staleness_bound() -> None:
    assert [freshness(s, 3, 1, ()) for s in (0, 1, 3, 4, 9)] == [1, 0.75, 0.25, 0, 0]


def test_bucket_weights_raise_the_freshness_of_recent_buckets() -> None:
    assert [freshness(s, 3, 1, (4.0, 2.0)) for s in (0, 1, 2)] == [4.0, 1.5, 1.0]
    assert freshness(2, 3, 2, (4.0, 2.0)) == 1.0  # two versions are one bucket back when a bucket is two wide


def test_the_least_priority_goes_first_and_the_older_of_equals() -> None:
    state = live((1, 0.5), (1, 0.1), (1, 0.1), (1, 0.9))
    first = state.heaps[1][0].member
    gone = state.evict(2, 1.0)
    assert [m.reward for m, _ in gone] == [0.1, 0.1]
    assert gone[0][0] == first
    assert state.size == 2


def test_fifo_evicts_in_order_of_arrival() -> None:
    assert evicted(live((1, 0.9), (2, 0.1), (1, 0.5), policy="fifo"), 1) == [(1, 0.9), (2, 0.1)]


def test_stalest_first_evicts_the_oldest_weights() -> None:
    assert evicted(live((3, 0.1), (1, 0.9), (2, 0.5), policy="stalest_first"), 1) == [(1, 0.9), (2, 0.5)]


def test_a_bucket_that_lost_its_share_is_spared_and_another_pays() -> None:
    state = live((1, 0.1), (1, 0.2), (1, 0.3), (1, 0.4), (2, 0.8), (2, 0.9))
    # half of bucket 1 is two; the third eviction has to come from bucket 2, though its priority is higher
    assert evicted(state, 3, share=0.5) == [(1, 0.1), (1, 0.2), (2, 0.8)]


def test_capacity_wins_when_every_bucket_has_lost_its_share() -> None:
    state = live((1, 0.1), (1, 0.2), (2, 0.8), (2, 0.9))
    gone = state.evict(1, 0.5)
    assert [m.reward for m, _ in gone] == [0.1, 0.8, 0.2]
    assert [("max_evicted_share" in reason) for _, reason in gone] == [False, False, True]


def test_what_is_too_old_expires_in_order_of_arrival() -> None:
    state = live((2, 0.5), (1, 0.9), (3, 0.1), (1, 0.2))
    assert [m.reward for m in state.expire(3)] == [0.5, 0.9, 0.2]
    assert state.by_bucket() == {3: 1}
    assert state.size == 1


def test_expiry_within_a_wide_bucket_goes_by_version() -> None:
    state = Live()
    for version in (4, 5):
        state.add(member(version), 2, 0.5, POLICIES["reward_priority"])
    assert [m.min_weight_version for m in state.expire(5)] == [4]
    assert state.by_bucket() == {2: 1}


def test_counts_of_dead_buckets_are_forgotten() -> None:
    state = live((1, 0.5), (2, 0.5))
    state.expire(2)
    state.forget(2)
    assert set(state.admitted) == {2}


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1)), max_size=40),
    st.integers(1, 10),
    st.sampled_from(sorted(POLICIES)),
    st.floats(0, 1),
)
def test_nothing_is_lost_and_capacity_holds(
    entries: list[tuple[int, float]], capacity: int, policy: str, share: float
) -> None:
    state = live(*entries, policy=policy)
    gone = state.evict(capacity, share)
    left = [e.member for heap in state.heaps.values() for e in heap]
    assert len(left) == state.size == min(len(entries), capacity)
    assert sorted(m.reward or 0.0 for m in [*left, *(m for m, _ in gone)]) == sorted(p for _, p in entries)
    assert sum(state.admitted.values()) - sum(state.evicted.values()) == state.size
