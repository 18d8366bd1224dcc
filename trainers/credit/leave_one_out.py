"""Credit against the siblings alone, one advantage a trajectory."""

import numpy as np
from numpy.typing import NDArray

from schemas.settings import Credit
from trainers.batches import Floats
from trainers.credit.evidence import Evidence


def leave_one_out_advantages(rewards: Floats, means: Floats, nums: NDArray[np.integer] | Floats) -> Floats:
    """Advantages [n] = reward - mean of the siblings; 0 where there is none.

    With m the mean over k rewards, r - (k m - r) / (k - 1) = (r - m) k / (k - 1). Source: RLOO, Ahmadian et al. 2024
    (arXiv 2402.14740), equation 8.
    """
    siblings = np.asarray(nums, np.float64)
    signal = (siblings > 1) & np.isfinite(rewards) & np.isfinite(means)
    return np.where(signal, (rewards - means) * siblings / np.maximum(siblings - 1, 1), 0.0)


def leave_one_out(evidence: Evidence, options: Credit) -> Floats:
    """Per turn, [m]: its trajectory's leave-one-out advantage, plus what its centered process rewards add up to."""
    e = evidence
    advantages = leave_one_out_advantages(e.outcomes, e.means, e.nums)
    return advantages[e.turns.owners] + e.centered_process_to_go(options.gamma)
