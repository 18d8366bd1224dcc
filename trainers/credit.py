"""Credit: how much better than its siblings a trajectory was, from its group's statistics."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STD_OFFSET = 1e-4
"""Added to the standard deviation, so that an almost constant group cannot blow up."""

_CONSTANT = 1e-9
"""A standard deviation below this share of the rewards' size is rounding, not signal."""


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """What a closed group says about one of its members: `std` is the sample deviation (n-1)."""

    mean: float
    std: float
    num_rewards: int
    zero_variance: bool


def group_statistics(rewards: NDArray[np.floating]) -> GroupStatistics:
    """Mean and deviation of `rewards` [n], two passes in float64: a constant group has a deviation of exactly 0."""
    values = np.asarray(rewards, np.float64)
    if values.size == 0 or values.min() == values.max():
        return GroupStatistics(float(values[0]) if values.size else 0.0, 0.0, values.size, True)
    return GroupStatistics(float(values.mean()), float(values.std(ddof=1)), values.size, False)


def group_advantages(rewards: Floats, means: Floats, stds: Floats) -> Floats:
    """Advantages [n] = (reward - mean) / (std + 1e-4) of n rows; exactly 0 where the group is constant or unscored.

    The statistics are those of each row's whole closed group, stale and dropped siblings included, so rows of one
    group may be trained in different steps. Source: GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1.2.
    """
    signal = _varied(means, stds) & np.isfinite(rewards)
    raw = (rewards - means) / (np.where(signal, stds, 1.0) + STD_OFFSET)
    return np.where(signal, raw, 0.0)


def leave_one_out_advantages(rewards: Floats, means: Floats, nums: NDArray[np.integer]) -> Floats:
    """Advantages [n] = reward - mean of the siblings; 0 where there is none.

    With m the mean over k rewards, r - (k m - r) / (k - 1) = (r - m) k / (k - 1). Source: RLOO, Ahmadian et al. 2024
    (arXiv 2402.14740), equation 8.
    """
    siblings = np.asarray(nums, np.float64)
    signal = (siblings > 1) & np.isfinite(rewards) & np.isfinite(means)
    return np.where(signal, (rewards - means) * siblings / np.maximum(siblings - 1, 1), 0.0)


def row_advantages(rows: pa.Table) -> Floats:
    """Advantages [n] of `rows`, each from its own group columns."""
    names = ("reward", "group_reward_mean", "group_reward_std")
    return group_advantages(*(rows.column(name).cast(pa.float64()).to_numpy() for name in names))


def _varied(means: Floats, stds: Floats) -> NDArray[np.bool_]:
    return np.isfinite(means) & np.isfinite(stds) & (stds > _CONSTANT * np.maximum(1.0, np.abs(means)))
