"""What an evaluation is worth: scores, their bounds, what could not be scored, and which version is best."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.messages import EvalResult, FamilyScore
from schemas.names import INFRASTRUCTURE_ERRORS
from schemas.trajectory import Trajectory

_Z95 = 1.959963984540054
_MAX_REASONS = 5


@dataclass(frozen=True, slots=True)
class Tally:
    """Episodes counted by how they ended."""

    successes: int
    num_scored: int
    unscored: Counter[str]

    @property
    def score(self) -> float | None:
        """Share of successes among the scored; None without any."""
        return self.successes / self.num_scored if self.num_scored else None

    @property
    def num_unscored(self) -> int:
        """Episodes that the infrastructure failed."""
        return self.unscored.total()

    @property
    def reason(self) -> str | None:
        """What kept episodes from a score, in words; None where all have one."""
        if not self.unscored:
            return None
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.unscored.most_common(_MAX_REASONS))
        return f"{self.num_unscored} of {self.num_unscored + self.num_scored} unscored: {kinds}"


def tally(episodes: Sequence[Trajectory], success_reward: float) -> Tally:
    """Count `episodes`. A failure of the agent's own counts as wrong, one of the infrastructure not at all.

    An infrastructure failure that brings a reward along, such as a broken judge's default of 0, is not believed.
    """
    unscored = Counter(str(e.error_kind) for e in episodes if e.error_kind in INFRASTRUCTURE_ERRORS)
    outcomes = _by_task(episodes, success_reward)
    return Tally(outcomes.count("1"), len(episodes) - unscored.total(), unscored)


def by_family(episodes: Sequence[Trajectory], success_reward: float) -> dict[str, FamilyScore]:
    """The score of each task family, and the outcomes of its `episodes` in their order."""
    families: dict[str, list[Trajectory]] = defaultdict(list)
    for episode in episodes:
        families[episode.task_family].append(episode)
    return {name: _family_score(members, success_reward) for name, members in sorted(families.items())}


def _family_score(episodes: Sequence[Trajectory], success_reward: float) -> FamilyScore:
    counts, outcomes = tally(episodes, success_reward), _by_task(episodes, success_reward)
    return FamilyScore(
        score=counts.score, num_scored=counts.num_scored, num_unscored=counts.num_unscored, by_task=outcomes
    )


def _by_task(episodes: Sequence[Trajectory], success_reward: float) -> str:
    """A letter for each episode, as in `schemas.messages.FamilyScore`."""
    return "".join(
        "-" if e.error_kind in INFRASTRUCTURE_ERRORS else str(int(e.reward is not None and e.reward >= success_reward))
        for e in episodes
    )


def wilson(successes: int, num_trials: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927): inside [0, 1], and honest near its ends.

    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    """
    if not num_trials:
        return 0.0, 1.0
    p, z2 = successes / num_trials, _Z95**2 / num_trials
    middle = (p + z2 / 2) / (1 + z2)
    half = _Z95 * math.sqrt(p * (1 - p) / num_trials + z2 / (4 * num_trials)) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def two_proportion_z(score_a: float, num_a: int, score_b: float, num_b: int) -> float:
    """How many standard errors a lies above b, pooled; 0 where neither varies."""
    pooled = (score_a * num_a + score_b * num_b) / (num_a + num_b)
    error = math.sqrt(pooled * (1 - pooled) * (1 / num_a + 1 / num_b))
    return (score_a - score_b) / error if error else 0.0


def may_lead(result: EvalResult, max_unscored_ratio: float) -> bool:
    """Whether a version with this result may become champion: it has a score, and enough of its episodes do."""
    total = result.num_scored + result.num_unscored
    return result.score is not None and result.num_unscored <= max_unscored_ratio * total


def leads(result: EvalResult, champion: EvalResult | None, max_unscored_ratio: float) -> bool:
    """Whether `result` makes a new champion: its lower bound is higher, so that luck in few episodes is not enough."""
    if not may_lead(result, max_unscored_ratio):
        return False
    return champion is None or (result.low or 0.0) > (champion.low or 0.0)
