"""What the lake's rows say of an experiment: runs by arm and seed, means with intervals, paired differences."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pyarrow as pa

from tests.experiments.arms import Experiment, plans
from tests.experiments.intervals import Mean, difference, mean

SCORE = "score"


@dataclass(frozen=True, slots=True)
class Findings:
    """`curves` by arm, seed and metric: (samples, value), in order; only of runs with the settings that stand now."""

    experiment: Experiment
    curves: dict[str, dict[int, dict[str, list[tuple[int, float]]]]]

    def at_end(self, arm: str, metric: str = SCORE) -> dict[int, float]:
        """Each seed's last figure."""
        runs = self.curves.get(arm, {}).items()
        return {seed: curves[metric][-1][1] for seed, curves in runs if metric in curves}

    def end(self, arm: str, metric: str = SCORE) -> Mean:
        """The mean over seeds at the end."""
        return mean(list(self.at_end(arm, metric).values()))

    def mark(self, arm: str) -> Mean:
        """The mean over seeds of the first score after the experiment's mark."""
        runs = [curves[SCORE] for curves in self.curves.get(arm, {}).values()]
        return mean([next(v for s, v in run if s >= round(self.experiment.marked * run[-1][0])) for run in runs])

    def gain(self, arm: str) -> Mean:
        """The paired difference to the first arm at the end."""
        return difference(self.at_end(arm), self.at_end(self.experiment.arms[0].name))

    def over(self, arm: str) -> Mean:
        """The mean over seeds of the mean score of all evaluations after the start: how fast it learned."""
        runs = (curves[SCORE][1:] for curves in self.curves.get(arm, {}).values())
        return mean([sum(value for _, value in run) / len(run) for run in runs])

    def curve(self, arm: str, metric: str = SCORE) -> list[tuple[float, Mean]]:
        """Means over seeds, evaluation by evaluation, by the mean number of samples."""
        runs = [curves[metric] for curves in self.curves.get(arm, {}).values() if metric in curves]
        return [
            (fmean(samples for samples, _ in points), mean([value for _, value in points]))
            for points in zip(*runs, strict=False)
        ]

    @property
    def num_runs(self) -> int:
        """Runs that have ended."""
        return sum(map(len, self.curves.values()))


def findings(experiment: Experiment, rows: pa.Table) -> Findings:
    """Those of `experiment`, of as many seeds as there are."""
    seeds = max(rows["seed"].to_pylist(), default=-1) + 1
    standing = {plan.key for plan in plans([replace(experiment, seeds=seeds)])}
    curves: dict[str, dict[int, Any]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in sorted(rows.to_pylist(), key=lambda row: row["step"]):
        if (row["experiment"], row["arm"], row["seed"], row["fingerprint"]) in standing:
            curves[row["arm"]][row["seed"]][row["metric"]].append((row["samples"], row["value"]))
    return Findings(experiment, curves)


def table(found: Findings) -> str:
    """The experiment as a Markdown table."""
    shown: Sequence[str] = found.experiment.shown
    first = found.experiment.arms[0].name
    share = found.experiment.marked
    marks = [f"score after {share:.0%}"] if share else []
    head = ["arm", "seeds", "score at the end", f"against {first!r}, paired", "score on the way", *marks, *shown]
    lines = [head, ["---"] * len(head)]
    for arm in found.experiment.arms:
        if not (count := found.end(arm.name).count):
            lines.append([arm.name, "0", *["-"] * (len(head) - 2)])
            continue
        gain = "" if arm.name == first else _signed(found.gain(arm.name))
        more = [str(found.mark(arm.name))] if share else []
        more += [str(found.end(arm.name, metric)) for metric in shown]
        lines.append([arm.name, str(count), str(found.end(arm.name)), gain, str(found.over(arm.name)), *more])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _signed(gain: Mean) -> str:
    if not gain.count:
        return "-"
    clear = " *" if gain.count > 1 and abs(gain.mean) > gain.half else ""
    return f"{gain.mean:+.3f}" + (f" ± {gain.half:.3f}{clear}" if gain.count > 1 else "")
