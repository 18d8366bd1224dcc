"""What scores are answered with: directives to the dispatcher, the learner and curation.

A pure state machine over eval results: the same results give the same directives.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference.significance import Evidence, clearest, one_sided
from schemas.messages import EvalResult, FamilyScore
from schemas.settings import Settings

RECENT = 8
"""A version is compared with each of this many before it; what it fell from is forgotten after as many."""

LOW_WEIGHT = 0.25
"""Factor of a mastered or hopeless family. Never 0: a family that was scored 0 by an outage comes back by itself."""

_MATERIAL = 0.25
"""A change of a family's factor below this sends nothing."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a directive will say: fields of `schemas.messages.Directive`."""

    target: str
    reason: str
    changes: dict[str, Any]


class Steering:
    """Answers eval results, in the order of their versions.

    A change is significant by `inference.significance`: on an unchanged policy at most a share `one_sided(fall_z)` of
    evaluations are taken for a fall.

    Attributes:
        family_weights: Factors of the families that were ordered last.
    """

    def __init__(self, settings: Settings) -> None:
        self.family_weights: dict[str, float] = {}
        self._settings = settings
        self._recent: deque[EvalResult] = deque(maxlen=RECENT)
        self._since: deque[EvalResult] | None = None
        self._newest = 0

    @property
    def fallen(self) -> bool:
        """A significant fall is being answered."""
        return self._since is not None

    def judge(self, result: EvalResult) -> list[Order]:
        """The orders that `result` calls for; none without a score, or where a newer version has been judged."""
        if result.score is None or not result.num_scored:
            return []
        before, is_news = list(self._recent), result.end_version >= self._newest
        self._newest = max(self._newest, result.end_version)
        self._recent.append(result)
        return [*self._families(result), *self._trend(result, before)] if is_news else []

    def _families(self, result: EvalResult) -> list[Order]:
        weights = self.family_weights | family_weights(result.families, self._settings)
        changed = {n: w for n, w in weights.items() if abs(w - self.family_weights.get(n, 1.0)) >= _MATERIAL}
        if not changed:
            return []
        self.family_weights = weights
        named = ", ".join(f"{name} {weight:g}" for name, weight in sorted(changed.items()))
        reason = f"scores of version {result.end_version} change the weight of {named}"
        return [Order("dispatch", reason, {"family_weights": weights})]

    def _trend(self, result: EvalResult, before: list[EvalResult]) -> list[Order]:
        if not before:
            return []
        evaluator = self._settings.evaluator
        fall, alpha = clearest((other, result) for other in before), one_sided(evaluator.fall_z)
        if self._since is not None:
            return self._recovery(fall, self._since)
        if fall.p >= alpha:
            return []
        self._since = deque(maxlen=RECENT)  # without this one: it was picked for being low, all others rise from it
        reason = f"{_named(result)} fell below {_named(fall.better)}: {fall.how}, is below {alpha:.2g}"
        return _orders(reason, evaluator.recent_bucket_weight, evaluator.learning_rate_scale)

    def _recovery(self, fall: Evidence, since: deque[EvalResult]) -> list[Order]:
        """A fall is over when the score is back, or rises: then what was wrong is over, and caution only slows it."""
        fall_z, result = self._settings.evaluator.fall_z, fall.worse
        over, alpha = one_sided(fall_z / 2), one_sided(fall_z)
        rise = clearest((result, other) for other in since) if since else None
        if fall.p > over:
            reason = f"{_named(result)} recovered to {_named(fall.better)}: {fall.how}, is above {over:.2g}"
        elif rise and rise.p < alpha:
            self._recent.clear()  # what it fell from would make this a fall again, and this was picked for being high
            reason = f"{_named(result)} rose from {_named(rise.worse)}: {rise.how}, is below {alpha:.2g}"
        else:
            since.append(result)
            return []
        self._since = None
        return _orders(reason, 1.0, 1.0)


def family_weights(scores: Mapping[str, FamilyScore], settings: Settings) -> dict[str, float]:
    """Factor of each scored family, in [LOW_WEIGHT, 1.5]: low where nothing is to be learned, else ½ + 4p(1-p).

    p(1-p) is the variance of a reward of 0 or 1: groups of such tasks differ most among themselves at p = ½.
    """
    return {name: _factor(s.score, settings) for name, s in sorted(scores.items()) if s.score is not None}


def _factor(score: float, settings: Settings) -> float:
    if score <= settings.curate.hopeless_below or score >= settings.curate.mastered_above:
        return LOW_WEIGHT
    return round(0.5 + 4 * score * (1 - score), 3)


def _orders(reason: str, recent_weight: float, learning_rate_scale: float) -> list[Order]:
    buckets = {"bucket_weights": (recent_weight, 1.0, 1.0, 1.0)}
    return [
        Order("learner", reason, buckets | {"learning_rate_scale": learning_rate_scale}),
        Order("curate", reason, buckets),
    ]


def _named(result: EvalResult) -> str:
    return f"version {result.end_version} ({result.score:.3f} of {result.num_scored})"
