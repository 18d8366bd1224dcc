"""Credit against what a value head expects: generalized advantage estimation over turns, and the head's own loss."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from schemas.settings import Credit
from trainers.batches import Floats, Ints
from trainers.credit.evidence import Evidence
from trainers.credit.group import STD_OFFSET


def gae(rewards: Sequence[float] | Floats, values: Sequence[float] | Floats, gamma: float, lam: float) -> Floats:
    """Advantages [k] of the k turns of one row that earned `rewards` [k].

    delta_t = r_t + gamma V_(t+1) - V_t; A_t = delta_t + gamma lam A_(t+1). Source: Schulman et al. 2016
    (arXiv 1506.02438), equation 16. A turn is one transition: tokens of observations are none, however many there are.

    Args:
        rewards: of each turn.
        values: before each turn, and after the last, [k + 1]: 0 where the row terminated, V where it was cut off.
        gamma: discount of a turn.
        lam: weight of longer returns.
    """
    advantages, follows = np.zeros(len(rewards)), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        follows = rewards[t] + gamma * values[t + 1] - values[t] + gamma * lam * follows
        advantages[t] = follows
    return advantages


def turn_states(evidence: Evidence) -> Ints:
    """Where the values of turns stand among those of all states, [m]: a row has one a turn, and one at its end."""
    return np.arange(len(evidence.turns.starts)) + evidence.turns.owners


def value_advantages(evidence: Evidence, values: Floats, options: Credit) -> tuple[Floats, Floats]:
    """GAE of each turn, [m], and what its value should have been, advantage + value, [m].

    `values` [m + n] are of all states, row by row: before each turn, and at the row's end. The end counts only where
    the row was cut off; what terminated has nothing to come.
    """
    e, bounds = evidence, evidence.turns.bounds
    rewards, advantages = np.nan_to_num(e.rewards), np.zeros(len(e.turns.starts))
    for row in range(len(bounds) - 1):
        start, end = int(bounds[row]), int(bounds[row + 1])
        expected = values[start + row : end + row + 1].copy()
        expected[-1] *= e.truncated[row]
        advantages[start:end] = gae(rewards[start:end], expected, options.gamma, options.lam)
    return advantages, advantages + values[turn_states(e)]


def whitened(advantages: Floats, counted: Ints) -> Floats:
    """(A - mean) / (std + 1e-4) with the statistics of the turns `counted`; as given where these are all alike.

    Source: Andrychowicz et al. 2020 (arXiv 2006.05990), choice C67.
    """
    some = advantages[counted]
    if some.size == 0 or np.ptp(some) <= 1e-9 * max(1.0, float(np.abs(some).max())):
        return advantages
    return (advantages - some.mean()) / (some.std() + STD_OFFSET)


def clipped_value_loss(values: Tensor, before: Tensor, targets: Tensor, clip: float) -> Tensor:
    """Per state, [k]: max((V - R)^2, (V' - R)^2) / 2, with V' = V kept within `clip` of what it was before the step.

    Source: PPO's reference code; Huang et al. 2022, "The 37 implementation details of PPO", detail 9.
    """
    near = before + (values - before).clamp(-clip, clip)
    return torch.maximum((values - targets).square(), (near - targets).square()) / 2


def explained_variance(values: Floats, targets: Floats) -> float:
    """1 - Var(target - value) / Var(target): 1 is perfect, 0 as good as a constant; 0 where targets do not vary."""
    variance = float(np.var(targets)) if targets.size else 0.0
    return 1.0 - float(np.var(targets - values)) / variance if variance > 1e-12 else 0.0
