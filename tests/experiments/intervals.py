"""Means over seeds and how far they can be trusted."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t


class Mean(NamedTuple):
    """A mean of `count` values, and half the width of its 95 % interval; NaN below two values."""

    mean: float
    half: float
    count: int

    def __str__(self) -> str:
        if not self.count:
            return "-"
        return f"{self.mean:.3f} ± {self.half:.3f}" if self.count > 1 else f"{self.mean:.3f}"


def mean(values: Sequence[float]) -> Mean:
    """Student's interval: mean ± t(0.975, n - 1) s / √n, with s the sample deviation."""
    n = len(values)
    if n < 2:
        return Mean(float(np.mean(values)) if n else float("nan"), float("nan"), n)
    half = float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n))
    return Mean(float(np.mean(values)), half, n)


def difference(arm: dict[int, float], reference: dict[int, float]) -> Mean:
    """The paired difference arm - reference over the seeds that both have."""
    seeds = sorted(arm.keys() & reference.keys())
    return mean([arm[seed] - reference[seed] for seed in seeds])
