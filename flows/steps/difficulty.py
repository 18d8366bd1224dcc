"""Difficulty of a task: a Beta posterior of its success, forgotten a little with every weight version."""

from typing import NamedTuple

from schemas.names import Origin, Status
from schemas.settings import Curate


class Posterior(NamedTuple):
    """Beta(alpha, beta) as of `weight_version`, from `num_groups` closed groups. The prior is Beta(1, 1)."""

    alpha: float = 1.0
    beta: float = 1.0
    weight_version: int = 0
    num_groups: int = 0

    @property
    def mean(self) -> float:
        """Expected success, in (0, 1)."""
        return self.alpha / (self.alpha + self.beta)

    def at(self, weight_version: int, discount: float) -> "Posterior":
        """The posterior at a later version: evidence keeps `discount` of its weight per version, the prior all."""
        kept = discount ** max(weight_version - self.weight_version, 0)
        alpha, beta = 1 + (self.alpha - 1) * kept, 1 + (self.beta - 1) * kept
        return Posterior(alpha, beta, max(weight_version, self.weight_version), self.num_groups)

    def observe(self, num_successes: int, num_failures: int) -> "Posterior":
        """The posterior after one more group."""
        return self._replace(
            alpha=self.alpha + num_successes, beta=self.beta + num_failures, num_groups=self.num_groups + 1
        )


def is_hard(mean: float, settings: Curate) -> bool:
    """Low success, but not hopeless."""
    return settings.hopeless_below <= mean < settings.hard_below


def failed_with_error(status: str, error_kind: str | None) -> bool:
    """Whether an episode ended badly by an error of the agent's own: hard, whatever its task."""
    return status in {Status.FAILED, Status.TRUNCATED} and error_kind is not None


def counts_for(origin: str) -> bool:
    """Whether groups of this origin tell how hard a task is: evals and branches sample it in other ways."""
    return origin == Origin.ROLLOUT
