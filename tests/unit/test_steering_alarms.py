"""How many falls are false alarms, and how soon a true one is found: on simulated evaluations, against the older rule.

Episodes are independent. In a run evaluations share seeds of sampling too, so that even fewer tasks differ.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean

import pytest

from inference.scoring import two_proportion_z
from inference.steering import RECENT, Steering
from schemas.messages import EvalResult
from schemas.settings import Settings
from tests.evaluations import outcome

SETTINGS = Settings()


class Unpaired:
    """The rule before this one: unpaired, against the best of the last eight scores."""

    def __init__(self) -> None:
        self._scores: deque[float] = deque(maxlen=RECENT)

    def falls(self, result: EvalResult) -> bool:
        best, score = max(self._scores, default=0.0), result.score or 0.0
        self._scores.append(score)
        return two_proportion_z(best, result.num_scored, score, result.num_scored) > SETTINGS.evaluator.fall_z


class Paired:
    """The rule of `Steering`."""

    def __init__(self) -> None:
        self._steering = Steering(SETTINGS)

    def falls(self, result: EvalResult) -> bool:
        was_fallen, _ = self._steering.fallen, self._steering.judge(result)
        return self._steering.fallen and not was_fallen


SEEDS = range(100)
EVEN = [0.5] * 240
"""Chances to solve 240 tasks. Two evaluations differ in half of the tasks, so that pairing is worth nothing."""
SETTLED = [0.95] * 120 + [0.05] * 120
"""Two evaluations differ in 2 * 0.95 * 0.05 = 9.5 % of the tasks."""
WORSE = [0.85] * 120 + [0.05] * 120
"""By 0.05 worse than `SETTLED` on the whole."""


def _evaluations(seed: int, *chances: Sequence[float]) -> Iterator[EvalResult]:
    rng = random.Random(seed)
    for version, of_tasks in enumerate(chances, 1):
        yield outcome(version, add="".join("01"[rng.random() < chance] for chance in of_tasks))


def _false_alarms(rule: type[Paired | Unpaired], chances: Sequence[float]) -> float:
    """The share of evaluations of an unchanged policy that are taken for a fall; 20 a run."""
    rules = {seed: rule() for seed in SEEDS}
    return fmean(rules[seed].falls(result) for seed in SEEDS for result in _evaluations(seed, *[chances] * 20))


@pytest.mark.parametrize("chances", [EVEN, SETTLED], ids=["even", "settled"])
def test_false_alarms_on_an_unchanged_policy_stay_below_what_the_setting_allows(chances: list[float]) -> None:
    assert 0 < _false_alarms(Paired, chances) < 0.0228


def test_the_unpaired_rule_had_false_alarms_by_the_tasks_too_many_or_none() -> None:
    assert _false_alarms(Unpaired, EVEN) > 3 * 0.0228
    assert _false_alarms(Unpaired, SETTLED) == 0


def test_a_fall_is_found_sooner_than_by_the_unpaired_rule_on_the_same_seeds() -> None:
    """A fall from 0.5 to 0.45 after eight evaluations: of 240 tasks 12 are lost on the whole.

    Two proportions of 240: error √(0.475 * 0.525 / 120) = 0.0456, so 0.05 is z 1.1 on average. Paired: tasks that
    differ number 120 * (0.95 * 0.15 + 0.85 * 0.05 + 2 * 0.95 * 0.05) = 33.6, so 12 are z 12 / √33.6 = 2.1.
    """
    delays = {rule: [_found_after(rule(), seed) for seed in SEEDS] for rule in (Paired, Unpaired)}
    assert 1.5 * sum(delays[Paired]) < sum(delays[Unpaired])  # 2.8 evaluations and 5.6 on average
    assert delays[Paired].count(1) > 2 * delays[Unpaired].count(1)  # 47 and 17 of 100


def _found_after(rule: Paired | Unpaired, seed: int) -> int:
    """The evaluation after the fall in which it was found; 9 if by the eighth it was not."""
    found = [rule.falls(result) for result in _evaluations(seed, *[SETTLED] * 8, *[WORSE] * 8)][8:]
    return [*found, True].index(True) + 1
