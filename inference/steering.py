"""What scores are answered with: directives to the dispatcher, the learner and curation.

A pure state machine over eval results: the same results give the same directives.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference.scoring import two_proportion_z
from schemas.messages import EvalResult, FamilyScore
from schemas.settings import Settings

RECENT = 8
"""A version is compared with the best of this many before it; an old best is forgotten after as many."""

LOW_WEIGHT = 0.25
"""Factor of a mastered or hopeless family. Never 0: a family that was scored 0 by an outage comes back by itself."""

TEST = "z of two proportions"
"""The test by which a change of the score is significant: `inference.scoring.two_proportion_z`."""

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

    Attributes:
        family_weights: Factors of the families that were ordered last.
    """

    def __init__(self, settings: Settings) -> None:
        self.family_weights: dict[str, float] = {}
        self._settings = settings
        self._recent: deque[EvalResult] = deque(maxlen=RECENT)
        self._lowest: EvalResult | None = None

    @property
    def fallen(self) -> bool:
        """A significant fall is being answered."""
        return self._lowest is not None

    def judge(self, result: EvalResult) -> list[Order]:
        """The orders that `result` calls for; none without a score, or where a newer version has been judged."""
        if result.score is None or not result.num_scored:
            return []
        is_news = result.end_version >= max((r.end_version for r in self._recent), default=0)
        orders = [*self._families(result), *self._trend(result)] if is_news else []
        self._recent.append(result)
        return orders

    def _families(self, result: EvalResult) -> list[Order]:
        weights = self.family_weights | family_weights(result.families, self._settings)
        changed = {n: w for n, w in weights.items() if abs(w - self.family_weights.get(n, 1.0)) >= _MATERIAL}
        if not changed:
            return []
        self.family_weights = weights
        named = ", ".join(f"{name} {weight:g}" for name, weight in sorted(changed.items()))
        reason = f"scores of version {result.end_version} change the weight of {named}"
        return [Order("dispatch", reason, {"family_weights": weights})]

    def _trend(self, result: EvalResult) -> list[Order]:
        evaluator = self._settings.evaluator
        best = max(self._recent, key=_score, default=result)
        z = _z(best, result)
        if self._lowest is not None:
            return self._recovery(result, self._lowest, best, z)
        if z <= evaluator.fall_z:
            return []
        self._lowest = result
        reason = f"{_named(result)} fell below {_named(best)}: {TEST} {z:.2f} is above {evaluator.fall_z:g}"
        return _orders(reason, evaluator.recent_bucket_weight, evaluator.learning_rate_scale)

    def _recovery(self, result: EvalResult, lowest: EvalResult, best: EvalResult, z: float) -> list[Order]:
        """A fall is over when the score is back, or rises: then what was wrong is over, and caution only slows it."""
        fall_z, rise = self._settings.evaluator.fall_z, _z(result, lowest)
        if z <= fall_z / 2:
            reason = f"{_named(result)} recovered to {_named(best)}: {TEST} {z:.2f}"
        elif rise > fall_z:
            self._recent.clear()  # or the best before the fall would make this one a fall again
            reason = f"{_named(result)} rose from {_named(lowest)}: {TEST} {rise:.2f} is above {fall_z:g}"
        else:
            self._lowest = min(lowest, result, key=_score)
            return []
        self._lowest = None
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


def _score(result: EvalResult) -> float:
    return result.score or 0.0


def _z(above: EvalResult, below: EvalResult) -> float:
    return two_proportion_z(_score(above), above.num_scored, _score(below), below.num_scored)


def _named(result: EvalResult) -> str:
    return f"version {result.end_version} ({result.score:.3f} of {result.num_scored})"
