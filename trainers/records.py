"""The rows that explain a step: `train_steps` and `train_samples`."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.lake import Lake
from schemas.tables import TRAIN_SAMPLES, TRAIN_STEPS
from trainers.batches import Floats, Ints
from trainers.checkpoint import Incarnation
from trainers.credit import ProcessScale
from trainers.credit.evidence import BRANCH_MEANS
from trainers.directives import Orders
from trainers.metrics import StepMetrics, TrajectoryMetrics, TurnMetrics
from trainers.signals import Signals
from trainers.stream import Batch, summary


@dataclass(frozen=True, slots=True)
class Step:
    """What a step was: its number, the version it started from, the batch and what it said."""

    number: int
    weight_version: int
    published_version: int | None
    learning_rate: float
    orders: Orders
    batch: Batch
    signals: Signals
    process_factor: float
    process_scale: ProcessScale
    wait_s: float


def step_row(
    step: Step, metrics: StepMetrics, turns: TurnMetrics, num_tokens: int, grad_norm: float, busy_s: float
) -> dict[str, Any]:
    """The figures of `step` that its row and MLflow share."""
    weights = step.signals.sample_weights
    process = step.signals.turns.rewards if "turns" in step.batch.rows.column_names else ()
    return {
        "step": step.number,
        "weight_version": step.weight_version,
        "published_version": step.published_version,
        "delta_version": step.batch.delta_version,
        "num_trajectories": step.batch.rows.num_rows,
        "num_tokens": num_tokens,
        **metrics.as_dict(),
        "grad_norm": grad_norm,
        "learning_rate": step.learning_rate,
        "learning_rate_scale": step.orders.learning_rate_scale,
        **summary(step.batch, step.weight_version),
        "process_reward_mean": float(np.mean(process)) if len(process) else None,
        "process_factor": step.process_factor,
        "value_loss": turns.value_loss,
        "explained_variance": turns.explained_variance,
        "probability_min": min(step.batch.probabilities, default=None),
        "sample_weight_max": None if weights is None else float(weights.max()),
        "wait_s": step.wait_s,
        "busy_s": busy_s,
        "directive_id": step.orders.directive_id,
    }


def rates(row: Mapping[str, Any]) -> dict[str, float]:
    """Of one step alone: action tokens per second of its time, and the share of that time spent waiting for data."""
    length_s = max(row["wait_s"] + row["busy_s"], 1e-9)
    return {"tokens_per_s": row["num_tokens"] / length_s, "wait_ratio": row["wait_s"] / length_s}


def engine_mismatch(step: Step, published_step: int, metrics: TrajectoryMetrics) -> float | None:
    """Mean |log importance ratio| where sampler and learner have equal weights: what their engines differ by.

    Equal weights: the first step after a publication, on rows that the published version sampled; None without any.
    """
    fresh = (step.batch.rows["min_weight_version"].to_numpy() == step.weight_version) & (metrics.num_tokens > 0)
    if step.number - 1 != published_step or not fresh.any():
        return None
    return float(np.average(metrics.log_ratio_abs[fresh], weights=metrics.num_tokens[fresh]))


def begins_at(lake: Lake, now: datetime) -> datetime:
    """The start of an incarnation that starts `now`: after that of any before it, even if the clock was set back.

    Views tell by it which of two steps with one number counts.
    """
    rows = lake.read(TRAIN_STEPS.name, "when the incarnations before this one began", ["incarnation_at"])
    before: datetime | None = pc.max(rows["incarnation_at"]).as_py()
    return now if before is None else max(now, before + timedelta(microseconds=1))


def lineage(incarnation: Incarnation, objective: str, mlflow_run: str | None) -> dict[str, Any]:
    """The columns of a step's row that are the same for all steps of an incarnation."""
    return {
        "incarnation": incarnation.name,
        "resumed_from_step": incarnation.resumed_from_step,
        "incarnation_at": incarnation.started_at,
        "objective": objective,
        "mlflow_run": mlflow_run,
    }


def sample_rows(step: Step, incarnation: str, metrics: TrajectoryMetrics, turns: TurnMetrics) -> pa.Table:
    """One row per trajectory of `step`; a trajectory's advantage is the mean over its turns."""
    bounds = step.signals.turns.bounds
    rows, count = step.batch.rows, step.batch.rows.num_rows
    versions = rows["min_weight_version"]
    columns: dict[str, Any] = {
        "step": np.full(count, step.number),
        "incarnation": [incarnation] * count,
        "trajectory_id": rows["trajectory_id"],
        "group_id": rows["group_id"],
        "min_weight_version": versions,
        "staleness": pc.subtract(pa.scalar(step.weight_version), versions),
        "use": step.batch.uses,
        "reward": rows["reward"],
        "advantage": _means(turns.advantages, bounds),
        "weight": metrics.weight,
        "probability": step.batch.probabilities or [None] * count,
        "sample_weight": [None] * count if step.signals.sample_weights is None else step.signals.sample_weights,
        "importance_ratio_mean": metrics.importance_ratio_mean,
        "importance_ratio_max": metrics.importance_ratio_max,
        "clip_ratio": metrics.clip_ratio,
        "num_tokens": step.batch.tokens.lengths,
        "num_generated_tokens": metrics.num_tokens,
        "delta_version": step.batch.delta_versions,
        "turn_advantages": _lists(turns.advantages, bounds),
        "turn_values": [None] * count if turns.values is None else _lists(turns.values, bounds),
        "turn_importance_ratios": _lists(turns.importance_ratios, bounds),
        "turn_branch_means": rows[BRANCH_MEANS] if BRANCH_MEANS in rows.column_names else [None] * count,
    }
    arrays = [_array(columns[f.name], f.type) for f in TRAIN_SAMPLES.schema]
    return pa.Table.from_arrays(arrays, schema=TRAIN_SAMPLES.delta_schema)


def _means(values: Floats, bounds: Ints) -> Floats:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[bounds[1:]] - sums[bounds[:-1]]) / np.maximum(np.diff(bounds), 1)


def _lists(values: Floats, bounds: Ints) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), pa.array(values, pa.float32()))


def _array(values: Any, type_: pa.DataType) -> pa.Array | pa.ChunkedArray:
    return values.cast(type_) if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, type_)
