"""Credit: group-relative advantages. Expected values worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trainers.credit import group_advantages, group_statistics, leave_one_out_advantages

LOSER_AND_WINNERS = np.array([0.0] + [0.95] * 7, np.float32)


def advantages(rewards: np.ndarray) -> np.ndarray:
    group = group_statistics(rewards)
    size = len(rewards)
    return group_advantages(rewards.astype(np.float64), np.full(size, group.mean), np.full(size, group.std))


@pytest.mark.parametrize("rewards", [[0.95] * 8, [0.1] * 3, [0.0] * 4, [1.0]])
def test_constant_group_has_zero_variance_and_advantages_of_exactly_zero(rewards: list[float]) -> None:
    values = np.array(rewards, np.float32)
    assert group_statistics(values).zero_variance
    assert group_statistics(values).std == 0.0
    assert (advantages(values) == 0.0).all()


def test_rounding_left_in_a_constant_groups_deviation_gives_no_advantage() -> None:
    # what a one-pass float32 variance would leave of eight rewards of 0.95
    assert (group_advantages(np.array([0.95]), np.array([0.95 + 1e-12]), np.array([1e-12])) == 0.0).all()


def test_one_loser_among_seven_winners_is_scored_by_the_whole_groups_deviation() -> None:
    # mean 0.83125; std (n-1) = sqrt((0.83125^2 + 7 * 0.11875^2) / 7) = 0.33588
    # loser (0 - 0.83125) / 0.33588 = -2.475, winners 0.11875 / 0.33588 = 0.354 (before 1e-4 is added to the deviation)
    group = group_statistics(LOSER_AND_WINNERS)
    assert not group.zero_variance
    assert group.mean == pytest.approx(0.83125)
    assert group.std == pytest.approx(0.335876, abs=1e-6)
    scored = advantages(LOSER_AND_WINNERS)
    assert scored[0] == pytest.approx(-2.475, abs=1e-3)
    assert scored[1:] == pytest.approx(np.full(7, 0.354), abs=1e-3)


def test_leave_one_out_compares_with_the_siblings_mean() -> None:
    # loser: 0 - 0.95; a winner: 0.95 - (0 + 6 * 0.95) / 7 = 0.13571
    size = len(LOSER_AND_WINNERS)
    group = group_statistics(LOSER_AND_WINNERS)
    rewards = LOSER_AND_WINNERS.astype(np.float64)
    scored = leave_one_out_advantages(rewards, np.full(size, group.mean), np.full(size, group.num_rewards))
    assert scored[0] == pytest.approx(-0.95)
    assert scored[1:] == pytest.approx(np.full(7, 0.95 / 7))


def test_a_reward_that_is_missing_earns_nothing() -> None:
    assert group_advantages(np.array([np.nan]), np.array([0.5]), np.array([0.5]))[0] == 0.0
    assert leave_one_out_advantages(np.array([0.7]), np.array([0.7]), np.array([1]))[0] == 0.0


def test_rows_of_one_group_may_come_in_different_batches() -> None:
    group = group_statistics(LOSER_AND_WINNERS)
    alone = group_advantages(np.array([0.0]), np.array([group.mean]), np.array([group.std]))
    assert alone[0] == advantages(LOSER_AND_WINNERS)[0]


@given(arrays(np.float32, st.integers(2, 16), elements=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.95, 1.0])))
def test_advantages_of_a_group_sum_to_zero_and_are_bounded(rewards: np.ndarray) -> None:
    scored = advantages(rewards)
    assert scored.sum() == pytest.approx(0.0, abs=1e-4)
    assert np.abs(scored).max() <= np.sqrt(len(rewards))  # of n values, one differs most: (n-1)/sqrt(n)
