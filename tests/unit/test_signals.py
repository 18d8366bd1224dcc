"""What a batch's rows say besides their tokens."""

import numpy as np
import pyarrow as pa
import pytest

from schemas.settings import Settings, load
from tests.experience import table
from trainers.credit import Turns
from trainers.signals import Signals, pairs, signals

ROWS = table([([1, 2], [False, True], [0, -1]), ([1, 2, 3], [False, True, True], [0, -1, -1])])


def rows(rewards: list[float], statuses: tuple[str, ...] = ("completed", "truncated")) -> pa.Table:
    means = [float(np.mean(rewards))] * 2
    columns = {"reward": rewards, "group_reward_mean": means, "group_reward_std": [0.7071] * 2}
    columns |= {"group_num_rewards": [2, 2]}
    return pa.table(columns | {"group_id": ["g", "g"], "status": list(statuses)})


def made_of(rows: pa.Table, settings: Settings) -> Signals:
    return signals(rows, ROWS, Turns.of(rows, ROWS), settings)


def test_pairs_are_a_groups_best_and_worst_where_they_differ() -> None:
    chosen, rejected = pairs(["a", "b", "a", "b", "a", "c"], np.array([0.0, 1.0, 1.0, 1.0, 0.5, np.nan]))
    assert (chosen.tolist(), rejected.tolist()) == ([2], [0])


def test_success_weights_make_the_mean_one_over_successes_tokens() -> None:
    # 1 and 2 action tokens; the second row succeeded: weight 3 / 2, so that the mean over 3 tokens of w is 1
    made = made_of(rows([0.0, 1.0]), load())
    assert made.success_weights.tolist() == pytest.approx([0.0, 1.5])
    assert (made.chosen.tolist(), made.rejected.tolist()) == ([1], [0])


def test_nobody_succeeded_means_nothing_to_imitate() -> None:
    assert made_of(rows([0.0, 0.0]), load()).success_weights.tolist() == [0.0, 0.0]


def test_advantages_are_a_rows_own_at_each_of_its_action_tokens() -> None:
    # (0 - 0.5) / (0.7071 + 1e-4) = -0.707
    made = made_of(rows([0.0, 1.0]), load())
    at_tokens = made.turns.spread(made.turn_advantages, ROWS)
    assert at_tokens.tolist() == pytest.approx([0, -0.707, 0, 0.707, 0.707], abs=1e-3)


def test_trajectories_that_were_cut_off_are_left_out_on_request() -> None:
    assert made_of(rows([0.0, 1.0]), load()).kept.tolist() == [True, True]
    masked = load(overrides=["--objective.mask_truncated=true"])
    assert made_of(rows([0.0, 1.0]), masked).kept.tolist() == [True, False]
