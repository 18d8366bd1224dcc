"""Metrics of a step, over action tokens only: each trajectory's sums first, so that micro-batches and ranks add up."""

from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainers.objectives import ActionTokens, Terms

COLUMNS = ("num_tokens", "loss", "kl", "entropy", "ratio", "log_ratio", "log_ratio_abs", "clipped", "ratio_max")
"""Columns of a trajectory's sums: all are sums over its action tokens but the last."""


@dataclass(frozen=True, slots=True)
class TrajectoryMetrics:
    """Per trajectory, shape [n].

    `weight` is the geometric mean of its importance ratios (GSPO, arXiv 2507.18071, equation 7), times its sample
    weight: the mean, not the product, so that a weight does not depend on the length of the answer.
    """

    num_tokens: NDArray[np.int64]
    weight: NDArray[np.float64]
    importance_ratio_mean: NDArray[np.float64]
    importance_ratio_max: NDArray[np.float64]
    clip_ratio: NDArray[np.float64]
    log_ratio_abs: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TurnMetrics:
    """Per turn of the global batch, [m]: advantages as trained on, mean importance ratios, values before the step.

    `values` are None without a value head, and so are `value_loss` (mean over turns) and `explained_variance`.
    """

    advantages: NDArray[np.float64]
    importance_ratios: NDArray[np.float64]
    values: NDArray[np.float64] | None = None
    value_loss: float | None = None
    explained_variance: float | None = None


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step; means are per action token of the global batch."""

    loss: float
    kl: float
    entropy: float
    importance_ratio_mean: float
    importance_ratio_max: float
    clip_ratio: float
    effective_sample_size: float
    effective_sample_ratio: float

    def as_dict(self) -> dict[str, float]:
        """Field by field."""
        return asdict(self)


def trajectory_sums(terms: Terms, tokens: ActionTokens) -> Tensor:
    """Sums [num_rows, len(COLUMNS)] in float64 over each row's action tokens."""
    logprobs = tokens.logprobs
    log_ratio = logprobs - tokens.behavior_logprobs
    sums = (
        torch.ones_like(logprobs),
        terms.loss,
        terms.kl,
        -logprobs,
        terms.importance_ratio,
        log_ratio,
        log_ratio.abs(),
        terms.clipped,
    )
    values = torch.stack([x.detach().double() for x in sums], dim=1)
    table = torch.zeros(tokens.num_rows, len(COLUMNS), dtype=torch.float64, device=logprobs.device)
    table[:, :-1].index_add_(0, tokens.owners, values)
    table[:, -1].scatter_reduce_(0, tokens.owners, terms.importance_ratio.double(), "amax")
    return table


def kish(weights: NDArray[np.float64]) -> float:
    """Kish's effective sample size (sum w)^2 / sum w^2, in [1, n]; 0 without weights (Kish 1965, section 11.7)."""
    squares = float(np.square(weights).sum())
    return float(weights.sum()) ** 2 / squares if squares > 0 else 0.0


def summarize(
    sums: NDArray[np.float64], sample_weights: NDArray[np.float64] | None = None
) -> tuple[StepMetrics, TrajectoryMetrics]:
    """Metrics of a step and of its trajectories, from the `sums` [n, len(COLUMNS)] of all its rows.

    `sample_weights` [n], which correct for how rows were drawn, are part of a trajectory's weight.
    """
    column = {name: sums[:, i] for i, name in enumerate(COLUMNS)}
    tokens = column["num_tokens"]
    per_row = np.maximum(tokens, 1)
    weights = np.where(tokens > 0, np.exp(column["log_ratio"] / per_row), 0.0)
    weights = weights if sample_weights is None else weights * sample_weights
    total = max(float(tokens.sum()), 1.0)
    size = kish(weights)
    step = StepMetrics(
        *(float(column[name].sum()) / total for name in ("loss", "kl", "entropy", "ratio")),
        importance_ratio_max=float(column["ratio_max"].max(initial=0.0)),
        clip_ratio=float(column["clipped"].sum()) / total,
        effective_sample_size=size,
        effective_sample_ratio=size / max(len(weights), 1),
    )
    rows = TrajectoryMetrics(
        tokens.astype(np.int64),
        weights,
        column["ratio"] / per_row,
        column["ratio_max"],
        column["clipped"] / per_row,
        column["log_ratio_abs"] / per_row,
    )
    return step, rows
