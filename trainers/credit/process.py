"""Process rewards: their weight, which falls to zero, and their scale, which is the outcome's."""

import numpy as np
from numpy.typing import NDArray

from schemas.messages import Count, Message
from schemas.settings import Credit

KEPT = 0.9
"""Share of the running variances that a batch leaves of what was before it."""
MAX_SCALE = 10.0


def process_weight(step: int, options: Credit) -> float:
    """Weight of process rewards in train step `step`, from 1: `process_weight`, falling linearly to 0."""
    return options.process_weight * max(0.0, 1 - (step - 1) / options.process_anneal_steps)


class ProcessScale(Message):
    """Running variances of outcomes (by trajectory) and process rewards (by turn); kept in checkpoints.

    Running, not the batch's own: once nearly all calls are valid, a batch may hold none that is not, or one, and its
    own deviation would make that one as loud as all outcomes together.
    """

    outcome: float = 0.0
    process: float = 0.0
    num_batches: Count = 0

    def after(self, outcomes: NDArray[np.floating], process: NDArray[np.floating]) -> "ProcessScale":
        """With one more batch in it; the start's zeros have no weight (as in Adam, arXiv 1412.6980, algorithm 1)."""
        finite = outcomes[np.isfinite(outcomes)]
        kept = KEPT * (1 - KEPT**self.num_batches) / (1 - KEPT ** (self.num_batches + 1))
        return ProcessScale(
            outcome=kept * self.outcome + (1 - kept) * _variance(finite),
            process=kept * self.process + (1 - kept) * _variance(process),
            num_batches=self.num_batches + 1,
        )

    @property
    def factor(self) -> float:
        """What process rewards are multiplied by, to deviate as outcomes do: at most 10, and 0 where neither varies."""
        if self.process <= 1e-12:
            return 0.0
        return min((self.outcome / self.process) ** 0.5, MAX_SCALE)


def _variance(values: NDArray[np.floating]) -> float:
    return float(np.var(values)) if values.size else 0.0
