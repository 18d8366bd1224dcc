"""Metrics of a step: over action tokens only, whatever the padding, micro-batches and ranks."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.experience import action_tokens, spread, table, terms_of
from trainers.batches import MicroBatch, Tokens, micro_batches
from trainers.credit import ProcessScale, Turns
from trainers.directives import Orders
from trainers.metrics import COLUMNS, StepMetrics, kish, summarize, trajectory_sums
from trainers.records import Step, engine_mismatch, rates
from trainers.reports import lag_fault
from trainers.signals import Signals
from trainers.stream import Batch


def measure(rows: Tokens, logprobs: torch.Tensor, parts: int = 1) -> StepMetrics:
    """Metrics where the learner gives token j of row i the logprob `logprobs[i, j]`."""
    sums = torch.zeros(len(rows.lengths), len(COLUMNS), dtype=torch.float64)
    for batch in micro_batches(rows, spread(np.ones(len(rows.lengths)), rows), parts):
        sums[batch.rows] = sums_of(batch, logprobs)
    return summarize(sums.numpy())[0]


def sums_of(batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    current = logprobs[batch.rows, 1 : batch.token_ids.shape[1]][batch.action_mask]
    return trajectory_sums(terms_of(batch, current), action_tokens(batch, current))


@pytest.mark.parametrize("padded_to", [17, 32])
def test_observation_tokens_and_padding_are_in_no_metric(padded_to: int) -> None:
    # a prompt token, 4 actions at ratio 1, 12 observation tokens with stored logprob 0 where the learner has -2.3:
    # the wrong mask would give (4 + 12 * 0.1) / 16 = 0.325
    mask = [False] + [True] * 4 + [False] * 12
    behavior = [0.0] + [-1.0] * 4 + [0.0] * 12
    rows = [([1] * 17, mask, behavior)]
    if padded_to > 17:  # a longer neighbor pads it
        rows.append(([1] * padded_to, [False] + [True] * (padded_to - 1), [0.0] + [-1.0] * (padded_to - 1)))
    logprobs = torch.full((len(rows), padded_to), -1.0)
    logprobs[0, 5:] = -2.3
    metrics = measure(table(rows), logprobs)
    assert metrics.importance_ratio_mean == pytest.approx(1.0)
    assert metrics.importance_ratio_max == pytest.approx(1.0)
    assert metrics.clip_ratio == 0.0
    assert metrics.effective_sample_ratio == pytest.approx(1.0)


def test_step_metrics_by_hand() -> None:
    # ratios of row 0: 2, 0.5 (geometric mean 1); of row 1: 3 -> weights 1 and 3: Kish (1+3)^2 / (1+9) = 1.6 of 2
    rows = table([([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0]), ([1, 2], [False, True], [0.0, -2.0])])
    logprobs = torch.tensor([[0.0, -1.0 + np.log(2), -1.0 - np.log(2)], [0.0, -2.0 + np.log(3), 0.0]])
    metrics = measure(rows, logprobs)
    assert metrics.effective_sample_size == pytest.approx(1.6)
    assert metrics.effective_sample_ratio == pytest.approx(0.8)
    assert metrics.importance_ratio_mean == pytest.approx((2 + 0.5 + 3) / 3)
    assert metrics.importance_ratio_max == pytest.approx(3.0)
    assert metrics.clip_ratio == pytest.approx(2 / 3)  # advantage 1: ratios 2 and 3 are cut, 0.5 is not
    assert metrics.entropy == pytest.approx((1 - np.log(2) + 1 + np.log(2) + 2 - np.log(3)) / 3)


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_metrics_do_not_depend_on_the_split(parts: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 9, 6)
    rows = table([([1] * n, [False, *(random.random(n - 1) < 0.7)], list(-random.random(n))) for n in lengths.tolist()])
    logprobs = -torch.from_numpy(random.random((6, 9)))
    whole, split = measure(rows, logprobs).as_dict(), measure(rows, logprobs, parts).as_dict()
    assert split == pytest.approx(whole, rel=1e-6, abs=1e-9)


def test_kish_size_of_equal_weights_is_their_number() -> None:
    assert kish(np.full(7, 0.3)) == pytest.approx(7.0)
    assert kish(np.array([5.0, 0.0, 0.0])) == pytest.approx(1.0)
    assert kish(np.zeros(3)) == 0.0


def test_throughput_is_of_one_step_alone() -> None:
    # three steps of 1,000 tokens in 2 s each: 500 a second each time, never cumulative
    for _ in range(3):
        assert rates({"num_tokens": 1000, "wait_s": 0.5, "busy_s": 1.5}) == {"tokens_per_s": 500.0, "wait_ratio": 0.25}


def test_services_that_stay_behind_are_a_fault_once_their_rows_are_of_no_use() -> None:
    assert [bool(lag_fault(version, 4, 3)) for version in (4, 7, 8)] == [False, False, True]
    assert lag_fault(9, None, 3) == ""


def test_engine_mismatch_is_measured_at_equal_weights_only() -> None:
    # step 6 follows the publication of version 3 after step 5; only the row that version 3 sampled counts
    rows = pa.table({"min_weight_version": [3, 2]})
    batch = Batch(rows, table([([1, 2], [False, True], [0.0, 0.0])] * 2), (1, 1), (0, 0), 0)
    none = np.zeros(0, np.int64)
    made = Signals(Turns.of(rows, batch.tokens), np.zeros(2), np.ones(2, np.bool_), np.zeros(2, np.float32), none, none)
    step = Step(6, 3, None, 1e-4, Orders(), batch, made, 0.0, ProcessScale(), 0.0)
    sums = np.zeros((2, len(COLUMNS)))
    sums[:, COLUMNS.index("num_tokens")] = 2
    sums[:, COLUMNS.index("log_ratio_abs")] = [0.5, 9.0]
    _, per_row = summarize(sums)
    assert engine_mismatch(step, 5, per_row) == pytest.approx(0.25)
    assert engine_mismatch(step, 4, per_row) is None


def test_sample_weights_are_part_of_the_effective_sample_size() -> None:
    # ratios of 1, sample weights 0.4 and 1.6: 2^2 / (0.16 + 2.56) = 1.47 of 2
    sums = np.zeros((2, len(COLUMNS)))
    sums[:, COLUMNS.index("num_tokens")] = 3
    step, rows = summarize(sums, np.array([0.4, 1.6]))
    assert step.effective_sample_size == pytest.approx(4 / 2.72)
    assert rows.weight.tolist() == [0.4, 1.6]
