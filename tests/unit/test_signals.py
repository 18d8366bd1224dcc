"""What a batch's rows say besides their tokens."""

import numpy as np
import pyarrow as pa
import pytest

from schemas.settings import Settings, load
from tests.experience import table
from trainers.credit import Turns
from trainers.signals import Signals, pairs, sample_weights, signals

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


def test_sample_weights_correct_for_the_draw_and_keep_the_steps_size() -> None:
    # 1 / 0.5 = 2 and 1 / 0.125 = 8, mean 5; to the power 1/2: 1.414 and 2.828, mean 2.121
    assert sample_weights([0.5, 0.125], 1.0).tolist() == pytest.approx([0.4, 1.6])
    assert sample_weights([0.5, 0.125], 0.5).tolist() == pytest.approx([2 / 3, 4 / 3])
    assert sample_weights([0.5, 0.125], 0.0).tolist() == [1.0, 1.0]


def test_a_row_counts_by_its_sample_weight_and_not_at_all_where_it_is_masked() -> None:
    corrected = load(overrides=["--learner.sampling_correction=1", "--objective.mask_truncated=true"])
    given = rows([0.0, 1.0])
    made = signals(given, ROWS, Turns.of(given, ROWS), corrected, probabilities=[0.5, 0.125])
    assert made.row_weights.tolist() == pytest.approx([0.4, 0.0])
