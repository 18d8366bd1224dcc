"""Statistics of a group, and how long it is remembered."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.steps.decode import decode
from flows.steps.groups import OpenGroup, close, forgettable, stats
from flows.steps.member import Member, members
from schemas.ids import shard_of
from schemas.trajectory import Trajectory
from tests.samples import group, message


def float32(values: list[float]) -> list[float]:
    """What an Arrow float32 column gives back."""
    return np.array(values, np.float32).astype(float).tolist()


def members_of(trajectories: list[Trajectory]) -> list[Member]:
    return members(decode(shard_of("add/7"), [message(trajectories, 0)], {}))


@pytest.mark.parametrize(("value", "n"), [(0.95, 8), (0.1, 3)])
def test_equal_rewards_have_exactly_no_variance(value: float, n: int) -> None:
    found = stats(float32([value] * n), 1.0)
    assert found.zero_variance
    assert found.std == 0
    assert found.mean == float32([value])[0]
    assert found.no_signal == f"all {n} rewards of the group are equal"


def test_one_loser_among_equals_gets_the_advantage_of_the_textbook() -> None:
    rewards = float32([0.0] + [0.95] * 7)
    found = stats(rewards, 1.0)
    assert not found.zero_variance
    assert found.mean is not None
    assert found.std is not None
    # mean 7 * 0.95 / 8 = 0.83125; variance (0.83125^2 + 7 * 0.11875^2) / 7 = 0.112813, std 0.335876
    assert found.mean == pytest.approx(0.83125, abs=1e-6)
    assert found.std == pytest.approx(0.335876, abs=1e-6)
    assert (0 - found.mean) / found.std == pytest.approx(-2.475, abs=1e-3)
    assert (rewards[1] - found.mean) / found.std == pytest.approx(0.354, abs=1e-3)


def test_one_reward_or_none_has_no_signal() -> None:
    assert stats([1.0], 1.0).no_signal == "1 rewards in the group: nothing to compare with"
    assert stats([1.0], 1.0).std is None
    nothing = stats([], 1.0)
    assert nothing.no_signal == "0 rewards in the group: nothing to compare with"
    assert (nothing.mean, nothing.pass_rate) == (None, None)


def test_pass_rate_counts_rewards_that_reach_success() -> None:
    assert stats([0.0, 0.5, 1.0, 1.5], 1.0).pass_rate == 0.5


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=32))
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    found = stats(rewards, 1.0)
    assert found.mean is not None
    assert sum(r - found.mean for r in rewards) == pytest.approx(0, abs=1e-9 * 32 * 100)
    assert found.zero_variance == (len(set(rewards)) == 1)


def test_a_closed_group_remembers_places_ids_and_statistics() -> None:
    everyone = members_of(group("a", [0.0, 1.0, 1.0, None]))
    open_group = OpenGroup.of(everyone[0], 5)
    for member in everyone[:3]:
        open_group.take(member, member.id_bytes)
        open_group.vote(member)
    closed = close(open_group, 9, 1.0)
    assert closed.places == 0b111
    assert closed.ids == b"".join(m.id_bytes for m in everyone[:3])
    assert (closed.closed_ms, closed.stats.num_rewards) == (9, 3)
    later = closed.with_late(everyone[3], everyone[3].id_bytes)
    assert later.places == 0b1111
    assert later.stats == closed.stats


def test_a_group_is_forgotten_when_it_is_too_old_and_no_lease_can_bring_a_member() -> None:
    open_group = OpenGroup.of(members_of(group("a", [0.0]))[0], 0)
    open_group.newest_version = 1
    closed = close(open_group, 0, 1.0)
    # max_staleness 3: members of version 1 matter up to learner version 1 + 3 + 2 = 6
    assert not forgettable(closed, 6, 3, now_ms=100_000, keep_s=10)
    assert not forgettable(closed, 7, 3, now_ms=10_000, keep_s=10)
    assert forgettable(closed, 7, 3, now_ms=10_001, keep_s=10)
