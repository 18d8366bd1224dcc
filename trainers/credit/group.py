"""Credit against the whole closed group, one advantage a trajectory."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.settings import Credit
from trainers.batches import Floats
from trainers.credit.evidence import Evidence

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
    return scaled(rewards - means, means, stds)


def scaled(differences: Floats, means: Floats, stds: Floats) -> Floats:
    """`differences` [n] / (std + 1e-4); exactly 0 where the group's deviation is no signal, or something is missing."""
    signal = np.isfinite(means) & np.isfinite(stds) & (stds > _CONSTANT * np.maximum(1.0, np.abs(means)))
    signal = signal & np.isfinite(differences)
    return np.where(signal, differences / (np.where(signal, stds, 1.0) + STD_OFFSET), 0.0)


def group(evidence: Evidence, options: Credit) -> Floats:
    """Per turn, [m]: (R - mean + P) / std, or without the division (Dr. GRPO, arXiv 2503.20783, equation 3).

    R is the trajectory's outcome, mean and std are of its whole closed group, P what its process rewards still add up
    to, each less the siblings' mean (GRPO, arXiv 2402.03300, section 4.1.3).
    """
    e, owners = evidence, evidence.turns.owners
    differences = (e.outcomes - e.means)[owners] + e.centered_process_to_go(options.gamma)
    if options.std:
        return scaled(differences, e.means[owners], e.stds[owners])
    return np.nan_to_num(differences, nan=0.0)
