"""The synchronous and the asynchronous twin of a run beside each other: figures from their lakes, by SQL.

`lagoon compare` writes them as JSON, a file that others may collect:

    {"rounds": [{"round": 1, "seed": 0, "order": ["async", "sync"],
                 "async": FIGURES, "sync": FIGURES, "versus": VERSUS}, ...]}

FIGURES of a run, seconds counted from the first group opened to the last step:

    run, folder, ended (why it ended early, or ""), balanced (the books of trajectories, tokens and groups)
    num_steps, num_samples (trajectories trained on), elapsed_s
    wait_s, train_s            of a step: waiting for its batch; all the rest. Means, without the first step
    busy_share                 {"rollout": r, "train": r, "eval": r}, each in [0, 1]
    effective_samples, effective_sample_ratio, cost_per_effective_sample (rollout and learner hours inside elapsed_s)
    staleness_mean, staleness_max
    curve                      [{version, train_step, num_samples, elapsed_s, score, num_scored}, ...], as in the view

VERSUS, where {…} is {"async": value, "sync": value}:

    num_samples, score_at_samples {…}, elapsed_at_samples_s {…}      at the most samples that both have a score for
    elapsed_s, score_at_time {…}                                     at the latest time that both have a score for
    target_score, elapsed_at_score_s {…}                             the lower of score_at_samples; null: not reached
    step_ratio                 time of a step, async / sync
    bound                      max(generate, train) / (generate + train), of the synchronous steps' wait_s and train_s
    of_bound                   step_ratio / bound; 1 is what overlap alone can give, below 1 nobody waited for the tail

A score "at" x is the mean over all episodes of the versions from WINDOW x to x: one version alone is too noisy.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from infra import sql
from infra.lake import Lake
from schemas.settings import Settings

MODES = ("async", "sync")
WINDOW = 0.75

Axis = Literal["num_samples", "elapsed_s"]
Figures = dict[str, Any]

_PACE = "select num_steps, num_samples, elapsed_s, wait_s, train_s from pace"
_BUSY = "select phase, busy_share from busy_shares"
_SAMPLES = """
with hours as (
    select sum(busy_s + idle_s) / 3600 as hours from busy_shares where phase in ('rollout', 'train')
)
select effective_samples, effective_sample_ratio,
       hours * accelerator_hour / nullif(effective_samples, 0) as cost_per_effective_sample
from effective_samples cross join prices cross join hours"""
_STALENESS = "select avg(staleness) as staleness_mean, max(staleness) as staleness_max from live_samples"
_BOOKS = "select (select bool_and(balanced and in_flight = 0) from conservation) and (select balanced from work)"
_CURVE = "select * from learning_curve"


def figures(settings: Settings, ended: str = "") -> Figures:
    """FIGURES of the run whose lake `settings` name; `ended` says why it ended early, if it did."""
    with sql.connect(Lake.of(settings), accelerator_hour=settings.cost.accelerator_hour) as lake:
        return {
            "run": settings.run.name,
            "folder": str(settings.run.folder),
            "ended": ended,
            "balanced": bool(next(iter(sql.rows(lake, _BOOKS)[0].values()))),
            **sql.rows(lake, _PACE)[0],
            "busy_share": {row["phase"]: row["busy_share"] for row in sql.rows(lake, _BUSY)},
            **sql.rows(lake, _SAMPLES)[0],
            **sql.rows(lake, _STALENESS)[0],
            "curve": sql.rows(lake, _CURVE),
        }


def versus(twins: Mapping[str, Figures]) -> dict[str, Any]:
    """VERSUS of the FIGURES of both modes; nothing where one of them has no score or not two steps."""
    curves = {mode: twins[mode]["curve"] for mode in MODES}
    if not all(curves.values()) or not all(twins[mode]["train_s"] for mode in MODES):
        return {}
    num_samples = min(curve[-1]["num_samples"] for curve in curves.values())
    elapsed_s = min(curve[-1]["elapsed_s"] for curve in curves.values())
    scores = {mode: score_at(curve, "num_samples", num_samples) for mode, curve in curves.items()}
    target = min(scores.values())
    step_s = {mode: twins[mode]["wait_s"] + twins[mode]["train_s"] for mode in MODES}
    bound = max(twins["sync"]["wait_s"], twins["sync"]["train_s"]) / step_s["sync"]
    return {
        "num_samples": num_samples,
        "score_at_samples": scores,
        "elapsed_at_samples_s": {mode: _elapsed_at(curve, num_samples) for mode, curve in curves.items()},
        "elapsed_s": elapsed_s,
        "score_at_time": {mode: score_at(curve, "elapsed_s", elapsed_s) for mode, curve in curves.items()},
        "target_score": target,
        "elapsed_at_score_s": {mode: reached(curve, target) for mode, curve in curves.items()},
        "step_ratio": step_s["async"] / step_s["sync"],
        "bound": bound,
        "of_bound": step_s["async"] / step_s["sync"] / bound,
    }


def score_at(curve: Sequence[Mapping[str, Any]], axis: Axis, limit: float) -> float:
    """Mean score over all episodes of the versions in (WINDOW x limit, limit]; of the last one before if none is there.

    `curve` begins with the starting policy, at 0 of both axes.
    """
    before = [point for point in curve if point[axis] <= limit]
    near = [point for point in before if point[axis] > WINDOW * limit] or before[-1:]
    return sum(p["score"] * p["num_scored"] for p in near) / sum(p["num_scored"] for p in near)


def reached(curve: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """Seconds until the score first was `target`, at equal windows of samples; None if it never was."""
    at = (p["elapsed_s"] for p in curve if score_at(curve, "num_samples", p["num_samples"]) >= target)
    return next(at, None)


def _elapsed_at(curve: Sequence[Mapping[str, Any]], num_samples: float) -> float:
    """Seconds until `num_samples` had been trained on and published, between scored versions by a straight line."""
    return float(np.interp(num_samples, [p["num_samples"] for p in curve], [p["elapsed_s"] for p in curve]))
