"""Alarms of the learner: signs that a run goes wrong, each told once when it begins, with what to do.

Rules look at the figures of the last train steps; a restart begins with none. `RULES` names those about steps, `STATES`
those about what the learner waits for.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client import Gauge

WINDOW = 10
"""Train steps of a window; trends compare the last window with the one before."""
MAX_IMPORTANCE_RATIO = 10.0
MIN_EFFECTIVE_SAMPLE_RATIO = 0.3
COLLAPSED_ENTROPY = 0.1
"""Share of the first window's entropy."""
LONGER = 1.25
SHORTER = 0.8
SIGNIFICANT = 2.0
"""Standard errors."""

Figures = Mapping[str, float]

_ALARM = Gauge("lagoon_learner_alarm", "1 while the alarm lasts", ["name"])


@dataclass(frozen=True, slots=True)
class History:
    """Figures of the `first` window of this life, and of the last two windows, `steps`; the newest is last."""

    first: Sequence[Figures]
    steps: Sequence[Figures]

    def windows(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Values of figure `name` in the window before and in the last one; None before there are both."""
        values = [step[name] for step in self.steps if name in step]
        return (np.array(values[:WINDOW]), np.array(values[WINDOW:])) if len(values) == 2 * WINDOW else None

    def all(self, name: str) -> np.ndarray:
        """Values of figure `name` in both windows, of the steps that have it."""
        return np.array([step[name] for step in self.steps if name in step])


@dataclass(frozen=True, slots=True)
class Rule:
    """`fault` says in words what is wrong, or nothing; `advice` what to do."""

    fault: Callable[[History], str]
    advice: str


def importance_ratio(history: History) -> str:
    """A token's ratio is above 10."""
    ratio = history.steps[-1]["importance_ratio_max"]
    return f"importance ratio {ratio:.1f} is above {MAX_IMPORTANCE_RATIO:g}" if ratio > MAX_IMPORTANCE_RATIO else ""


def effective_samples(history: History) -> str:
    """Kish's effective sample size is below 0.3 of the batch."""
    share = history.steps[-1]["effective_sample_ratio"]
    low = share < MIN_EFFECTIVE_SAMPLE_RATIO
    return f"effective sample ratio {share:.2f} is below {MIN_EFFECTIVE_SAMPLE_RATIO:g}" if low else ""


def reward_hacking(history: History) -> str:
    """Process rewards that are trained on rise while outcomes fall, both by more than chance."""
    process, outcome = history.windows("process_reward_mean"), history.windows("reward_mean")
    trained_on = any(step.get("process_factor", 0.0) > 0 for step in history.steps)
    if process is None or outcome is None or not trained_on:
        return ""
    if z(*process) < SIGNIFICANT or z(*outcome) > -SIGNIFICANT:
        return ""
    return f"process reward rose {_change(process)} while the outcome fell {_change(outcome)} over {WINDOW} steps"


def entropy_collapse(history: History) -> str:
    """The policy has all but stopped to vary its actions."""
    windows = history.windows("entropy")
    if windows is None or len(history.first) < WINDOW:
        return ""
    began, now = float(np.mean([step["entropy"] for step in history.first])), float(windows[1].mean())
    if now >= COLLAPSED_ENTROPY * began:
        return ""
    return f"entropy {now:.4f} per token is below {COLLAPSED_ENTROPY:g} of the {began:.4f} that this life began with"


def length_growth(history: History) -> str:
    """Trajectories grow longer by a quarter, and earn no more for it."""
    lengths, outcome = history.windows("tokens_per_trajectory"), history.windows("reward_mean")
    if lengths is None or outcome is None:
        return ""
    grown = lengths[1].mean() > LONGER * lengths[0].mean() and z(*lengths) > SIGNIFICANT
    if not grown or z(*outcome) > SIGNIFICANT:
        return ""
    return f"action tokens a trajectory rose {_change(lengths)} over {WINDOW} steps and the outcome did not"


def length_bias(history: History) -> str:
    """What is trained on is shorter by a fifth than what is produced: long episodes come too late."""
    produced, trained = history.all("produced_length"), history.all("tokens_per_trajectory")
    if min(len(produced), len(trained)) < WINDOW:
        return ""
    if trained.mean() >= SHORTER * produced.mean() or z(produced, trained) > -SIGNIFICANT:
        return ""
    dropped = history.all("dropped_length")
    lost = f", {dropped.mean():.0f} in one that was dropped" if len(dropped) else ""
    return (
        f"{trained.mean():.0f} action tokens in a trajectory that was trained on, {produced.mean():.0f} in one that "
        f"was produced{lost}, over {len(history.steps)} steps"
    )


RULES: dict[str, Rule] = {
    "importance_ratio": Rule(
        importance_ratio,
        "lower loop.max_staleness or learner.learning_rate, set objective.ratio_correction or sequence_band; if the "
        "metric engine_mismatch is high, sampler and learner disagree at equal weights: compare their precision",
    ),
    "effective_samples": Rule(
        effective_samples, "most of the batch is off-policy: lower loop.max_staleness, add rollout services"
    ),
    "reward_hacking": Rule(
        reward_hacking,
        "the policy earns turn rewards instead of outcomes: lower credit.process_weight or "
        "credit.process_anneal_steps, look at trajectories (`lagoon explain`), mend the environment's turn_reward",
    ),
    "entropy_collapse": Rule(
        entropy_collapse,
        "the policy repeats itself: raise objective.clip_high or objective.kl, lower learner.learning_rate, go on from "
        "an earlier checkpoint; harmless where the tasks are solved",
    ),
    "length_growth": Rule(
        length_growth,
        'set objective.aggregation = "constant" and credit.std = false, objective.mask_truncated',
    ),
    "length_bias": Rule(
        length_bias,
        "long episodes come too late to be trained on: raise loop.max_staleness, lower dispatch.updates_ahead, add "
        "rollout services; see views length_bias and starved_tasks",
    ),
}
STATES: dict[str, str] = {
    "empty_buffer": "see the rollout services, curate and dispatch: `lagoon doctor`",
    "policy_lag": "rollout services do not take new weights: see their health and the weight store (`lagoon status`)",
    "no_new_weights": "see why steps take so long or none is done (`lagoon status`); a directive may pause the learner",
}


class Alarms:
    """Keeps which alarms are on; logs each when it begins, and when it is over. `log` is a structured logger."""

    def __init__(self, log: Any):
        self._log = log
        self._first: list[Figures] = []
        self._steps: deque[Figures] = deque(maxlen=2 * WINDOW)
        self.active: dict[str, str] = {}
        self.onsets: Counter[str] = Counter()
        for name in (*RULES, *STATES):
            _ALARM.labels(name).set(0)

    def step(self, figures: Figures) -> None:
        """Look at the figures of a train step that is done."""
        self._steps.append(figures)
        if len(self._first) < WINDOW:
            self._first.append(figures)
        history = History(self._first, list(self._steps))
        for name, rule in RULES.items():
            self.set(name, rule.fault(history), rule.advice)

    def state(self, name: str, reason: str) -> None:
        """Set one of STATES: on for `reason`, off without one."""
        self.set(name, reason, STATES[name])

    def set(self, name: str, reason: str, advice: str) -> None:
        """Set an alarm; only the change from off to on is told as news."""
        _ALARM.labels(name).set(bool(reason))
        if reason and name not in self.active:
            self.onsets[name] += 1
            self._log.warning("alarm", alarm=name, reason=reason, advice=advice)
        elif not reason and name in self.active:
            self._log.info("alarm is over", alarm=name)
        self.active = {**self.active, name: reason} if reason else {k: v for k, v in self.active.items() if k != name}


def z(before: np.ndarray, after: np.ndarray) -> float:
    """Difference of the means in standard errors (Welch's t); infinite where neither window varies."""
    difference = float(after.mean() - before.mean())
    error = float(np.sqrt(before.var(ddof=1) / len(before) + after.var(ddof=1) / len(after)))
    if error > 1e-12:
        return difference / error
    return 0.0 if abs(difference) < 1e-12 else float(np.copysign(np.inf, difference))


def _change(windows: tuple[np.ndarray, np.ndarray]) -> str:
    return f"from {windows[0].mean():.3f} to {windows[1].mean():.3f}"
