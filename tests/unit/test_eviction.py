"""Priorities, policies, and what goes when a shard is full."""

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.steps.eviction import FULL_WITHOUT_GUARD, POLICIES, Live, capacity_of_a_shard, freshness, priority
from flows.steps.member import Member
from schemas.settings import Curate

SETTINGS = Curate(hard_bonus=0.25, freshness_weight=0.25, completion_bonus=0.1)
_ids = itertools.count()


def member(version: int = 1, reward: float = 1.0, status: str = "completed", group: str | None = None) -> Member:
    """A trajectory, by default of a group of its own."""
    number = next(_ids)
    values: dict[str, object] = dict.fromkeys(Member._fields, 0)
    values |= {"trajectory_id": f"{number:032x}", "group_id": group or f"of {number}"}
    values |= {"min_weight_version": version, "reward": reward, "status": status}
    return Member(**values)  # pyright: ignore[reportArgumentType]


def live(*entries: tuple[int, float], policy: str = "reward_priority", size: int = 1) -> Live:
    """Groups of `size` as (bucket, mean priority), in order of arrival."""
    found = Live()
    for number, (bucket, value) in enumerate(entries):
        members = [member(bucket, value, group=f"{number}") for _ in range(size)]
        found.add(members, bucket, value, POLICIES[policy])
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
    first = state.heaps[1][0].members[0]
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


def test_siblings_leave_together_by_the_mean_of_their_priorities() -> None:
    # rows alone would lose 0.1 of the first group; its mean is 0.5, that of the second 0.3
    state = Live()
    for name, rewards in (("a", [0.1, 0.9]), ("b", [0.3, 0.3])):
        state.add([member(1, r, group=name) for r in rewards], 1, sum(rewards) / 2, POLICIES["reward_priority"])
    assert evicted(state, 3) == [(1, 0.3), (1, 0.3)]
    assert (state.size, list(state.groups)) == (2, ["a"])


def test_a_bucket_is_spared_a_group_that_would_be_more_than_its_share() -> None:
    # two groups of two in each bucket: half of four is one group
    state = live((1, 0.1), (1, 0.2), (2, 0.8), (2, 0.9), size=2)
    assert evicted(state, 5, share=0.5) == [(1, 0.1)] * 2 + [(2, 0.8)] * 2
    # a quarter is less than a group: no bucket can pay, so the least goes
    assert [reason for _, reason in live((1, 0.1), (2, 0.2), size=2).evict(3, 0.25)] == [FULL_WITHOUT_GUARD] * 2


def test_a_group_that_is_alone_stays_though_it_is_larger_than_the_shard() -> None:
    state = live((1, 0.5), size=8)
    assert evicted(state, 2) == []
    state.add([member(1, 0.4, group="worse")], 1, 0.4, POLICIES["reward_priority"])
    assert evicted(state, 2) == [(1, 0.4)]
    state.add([member(1, 0.6, group="better")], 1, 0.6, POLICIES["reward_priority"])
    assert evicted(state, 2) == [(1, 0.5)] * 8
    assert state.size == 1


def test_a_late_member_shares_the_fate_of_its_group_while_that_lives() -> None:
    state = live((2, 0.1), (2, 0.5), size=2)
    state.add([member(1, 0.9, group="0")], 1, 0.9, POLICIES["reward_priority"])
    assert state.by_bucket() == {2: 5}
    assert evicted(state, 4) == [(2, 0.1), (2, 0.1), (1, 0.9)]
    state.add([member(1, 0.9, group="0")], 1, 0.9, POLICIES["reward_priority"])
    assert state.by_bucket() == {1: 1, 2: 2}


def test_what_expiry_leaves_of_a_group_is_still_evicted_together() -> None:
    state = live((1, 0.9))
    state.add([member(v, 0.1, group="mixed") for v in (1, 2, 2)], 2, 0.1, POLICIES["reward_priority"])
    assert [m.min_weight_version for m in state.expire(2)] == [1, 1]
    state.add([member(2, 0.7, group="other")], 2, 0.7, POLICIES["reward_priority"])
    assert evicted(state, 2) == [(2, 0.1)] * 2
    assert list(state.groups) == ["other"]


def test_what_is_too_old_expires_in_order_of_arrival() -> None:
    state = live((2, 0.5), (1, 0.9), (3, 0.1), (1, 0.2))
    assert [m.reward for m in state.expire(3)] == [0.5, 0.9, 0.2]
    assert state.by_bucket() == {3: 1}
    assert state.size == 1


def test_expiry_within_a_wide_bucket_goes_by_version() -> None:
    state = Live()
    for version in (4, 5):
        state.add([member(version)], 2, 0.5, POLICIES["reward_priority"])
    assert [m.min_weight_version for m in state.expire(5)] == [4]
    assert state.by_bucket() == {2: 1}


def test_counts_of_dead_buckets_are_forgotten() -> None:
    state = live((1, 0.5), (2, 0.5))
    state.expire(2)
    state.forget(2)
    assert set(state.admitted) == {2}


@given(
    st.lists(st.tuples(st.integers(0, 4), st.lists(st.floats(0, 1), min_size=1, max_size=5)), max_size=20),
    st.integers(1, 12),
    st.sampled_from(sorted(POLICIES)),
    st.floats(0, 1),
    st.integers(0, 4),
)
def test_nothing_is_lost_capacity_holds_and_no_group_is_torn(
    groups: list[tuple[int, list[float]]], capacity: int, policy: str, share: float, oldest: int
) -> None:
    state, gone = Live(), list[Member]()
    for number, (bucket, values) in enumerate(groups):
        members = [member(bucket, value, group=f"{number}") for value in values]
        state.add(members, bucket, sum(values) / len(values), POLICIES[policy])
        gone += [m for m, _ in state.evict(capacity, share)]
        state = pickle.loads(pickle.dumps(state))
        assert state.size <= capacity or len(state.groups) == 1
    gone += state.expire(oldest)
    left = [m for heap in state.heaps.values() for e in heap for m in e.members]
    assert left == [
        m for bucket in state.heaps for e in state.heaps[bucket] for m in state.groups[e.members[0].group_id][1]
    ]
    assert len(left) == state.size == sum(state.by_bucket().values())
    assert sorted(m.reward or 0.0 for m in [*left, *gone]) == sorted(v for _, values in groups for v in values)
    assert {m.group_id for m in left}.isdisjoint(m.group_id for m in gone)
    for bucket, lost in state.evicted.items():
        assert lost <= state.admitted[bucket]
