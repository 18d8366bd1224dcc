"""Plots with error bars: 95 % intervals of means over seeds."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.experiments.findings import Findings
from tests.experiments.intervals import Mean
from tests.experiments.variants.staleness import LAGS, OBJECTIVES, ON_POLICY

mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "lagoon"})

MANY = 4
"""With more arms than this the legend stands beside the curves, which it would hide."""


def draw(found: Findings, folder: Path) -> Path:
    """The plot of an experiment, as a PNG in `folder`."""
    arms, has_lags = [arm.name for arm in found.experiment.arms], found.experiment.name == "staleness"
    figure = Figure(figsize=(9.0 if has_lags or len(arms) > MANY else 5.5, 3.4), layout="constrained")
    if has_lags:
        left, right = figure.subplots(1, 2)
        by_lag(left, found)
        curves(right, found, [ON_POLICY.name, *(f"{name}, k=8" for name in OBJECTIVES)])
    else:
        curves(figure.subplots(), found, arms)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found.experiment.name}.png"
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


def curves(axes: Axes, found: Findings, arms: Sequence[str]) -> None:
    """Score by samples."""
    for number, arm in enumerate(arms):
        points = found.curve(arm)
        shift = 1 + 0.004 * (number - len(arms) / 2)  # so that error bars do not hide one another
        _bars(axes, [samples * shift for samples, _ in points], [value for _, value in points], arm)
    axes.set(xlabel="episodes sampled for training", ylabel="held-out score", ylim=(0, 1))
    beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if len(arms) > MANY else {}
    axes.legend(frameon=False, **beside)


def by_lag(axes: Axes, found: Findings) -> None:
    """Score at the end by staleness; the leftmost point is shared."""
    start = found.end(ON_POLICY.name)
    for name in OBJECTIVES:
        ends = [start, *(found.end(f"{name}, k={lag}") for lag in LAGS)]
        _bars(axes, list(range(len(ends))), ends, name)
    axes.set(xlabel="versions that every sample is old, k", ylabel="held-out score at equal samples", ylim=(0, 1))
    axes.set_xticks(range(len(LAGS) + 1), ["0", *map(str, LAGS)])
    axes.legend(frameon=False)


def _bars(axes: Axes, places: Sequence[float], means: Sequence[Mean], label: str) -> None:
    halves = [m.half if m.count > 1 else 0.0 for m in means]
    axes.errorbar(
        places, [m.mean for m in means], halves, label=label, capsize=2, marker="o", markersize=3, linewidth=1
    )
