"""The figures of `lagoon compare` in the words of this report."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.experiments.intervals import Mean, mean

MODES = ("async", "sync")

Round = Mapping[str, Any]

_OF_A_RUN = {
    "seconds of a step: waiting for samples": ("wait_s",),
    "seconds of a step: training, publishing": ("train_s",),
    "rollouts busy": ("busy_share", "rollout"),
    "learner busy": ("busy_share", "train"),
    "effective sample ratio": ("effective_sample_ratio",),
    "cost per effective sample": ("cost_per_effective_sample",),
    "staleness, mean": ("staleness_mean",),
}
_OF_BOTH = {
    "score at equal samples": "score_at_samples",
    "score at equal time": "score_at_time",
    "seconds to the same score": "elapsed_at_score_s",
}
_BOUND = {
    "a step's time, async / sync": "step_ratio",
    "max(generate, train) / (generate + train)": "bound",
    "the first over the second; 1: all that overlap can give": "of_bound",
}


def comparison(rounds: Sequence[Round]) -> str:
    """A Markdown table, means and 95 % intervals over the rounds in which both runs came to a score."""
    rounds = [made for made in rounds if made.get("versus")]
    lines = [[f"{len(rounds)} rounds", *MODES], ["---"] * 3]
    for label, name in _OF_BOTH.items():
        lines.append([label, *(_cell([made["versus"][name][mode] for made in rounds]) for mode in MODES)])
    for label, path in _OF_A_RUN.items():
        lines.append([label, *(_cell([_at(made[mode], path) for made in rounds]) for mode in MODES)])
    for label, name in _BOUND.items():
        lines.append([label, _cell([made["versus"][name] for made in rounds]), ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _at(figures: Mapping[str, Any], path: Sequence[str]) -> float | None:
    found: Any = figures
    for name in path:
        found = found.get(name) if found else None
    return found


def _cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return _shown(mean(known)) if known else "none"


def _shown(value: Mean) -> str:
    digits = 3 if not value.mean or abs(value.mean) >= 0.01 else 6
    return f"{value.mean:.{digits}f}" + (f" ± {value.half:.{digits}f}" if value.count > 1 else "")
