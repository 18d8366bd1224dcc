"""Which task next: a function of the draw's number, the seed, and what is known about difficulty."""

import random
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from flows.steps.difficulty import Posterior, is_hard
from schemas.errors import SettingsError
from schemas.ids import task_id
from schemas.settings import Curate, Family

HARD, NORMAL, RESTING = 2.0, 1.0, 0.05
"""Weights of a draw: hard tasks twice as often; hopeless and mastered ones rest, but are tried now and then."""

MAX_TRIES = 256


class Deal(NamedTuple):
    """How families share the draws: factors on the settings' weights (directives), and the share that explores."""

    family_weights: Mapping[str, float]
    exploration: float


class Choice(NamedTuple):
    """A drawn task. `reason` is set for a draw that ignored difficulty."""

    family: Family
    task_index: int
    reason: str | None


class Difficulty(NamedTuple):
    """What is known of tasks: posteriors, the learner's version, and how to read them."""

    posteriors: Mapping[str, Posterior]
    weight_version: int
    settings: Curate

    def weight(self, task: str) -> float:
        """How often `task` is drawn, relative to one that nothing is known of.

        Evidence fades with every version, so a task that was hopeless is normal again after some.
        """
        known = self.posteriors.get(task)
        if known is None:
            return NORMAL
        mean = known.at(self.weight_version, self.settings.posterior_discount).mean
        if is_hard(mean, self.settings):
            return HARD
        return RESTING if mean < self.settings.hopeless_below or mean > self.settings.mastered_above else NORMAL


def dealt(families: Sequence[Family]) -> list[Family]:
    """The families that have tasks to train on.

    Raises:
        SettingsError: none has.
    """
    found = [f for f in families if f.weight > 0 and f.num_train > 0]
    if not found:
        raise SettingsError(f"none of {len(families)} families has a weight and a task that is not held out")
    return found


def draw(
    seed: int, number: int, families: Sequence[Family], difficulty: Difficulty, deal: Deal, *, busy: Collection[str]
) -> Choice:
    """The task of draw `number`. Never a held-out one, nor one in `busy` while there are others.

    One draw in 1/exploration explores: it takes the families in turn and any task of theirs, so that every family with
    a weight in the settings is drawn at least once in len(families)/exploration draws, whatever its difficulty. The
    others take a task with probability ~ family weight / tasks of the family x weight of its difficulty, by rejection.
    """
    rng = random.Random(f"{seed}/{number}")
    candidates = dealt(families)
    every = round(1 / deal.exploration) if deal.exploration > 0 else 0
    if every and number % every == 0:
        return _explore(rng, candidates[number // every % len(candidates)], busy)
    return _by_difficulty(rng, candidates, _shares(candidates, deal), difficulty, busy)


def _shares(families: Sequence[Family], deal: Deal) -> list[float]:
    shares = [f.weight * deal.family_weights.get(f.name, 1.0) for f in families]
    return shares if sum(shares) > 0 else [f.weight for f in families]


def _by_difficulty(
    rng: random.Random,
    families: Sequence[Family],
    shares: list[float],
    difficulty: Difficulty,
    busy: Collection[str],
) -> Choice:
    choice = None
    for _ in range(MAX_TRIES):
        family = rng.choices(families, shares)[0]
        index = rng.randrange(family.num_train)
        task = task_id(family.name, index)
        if task in busy:
            continue
        choice = Choice(family, index, None)
        if rng.random() * HARD < difficulty.weight(task):
            return choice
    return choice or _explore(rng, rng.choices(families, shares)[0], busy)


def _explore(rng: random.Random, family: Family, busy: Collection[str]) -> Choice:
    tries = (rng.randrange(family.num_train) for _ in range(MAX_TRIES))
    index = next((i for i in tries if task_id(family.name, i) not in busy), 0)
    return Choice(family, index, "exploration")
