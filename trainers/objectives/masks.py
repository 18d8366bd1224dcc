"""Which trajectories are too far off-policy to learn from at all."""

import torch
from torch import Tensor

from schemas.settings import Objective
from trainers.objectives.terms import ActionTokens


def off_policy(tokens: ActionTokens, options: Objective) -> Tensor:
    """Bool [n]: tokens of rows that a rule takes out.

    `sequence_band` (low, high): rows whose geometric mean ratio exp(mean log r) is outside it; source: seq-mask-tis,
    Liu et al. 2025, "When speed kills stability". `negative_shift`: rows with a negative mean advantage whose
    mean(log behavior - log policy) is above it: the policy has moved away already, and pushing further has no end;
    source: off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556), section 3.1.
    """
    shift = tokens.row_means((tokens.behavior_logprobs - tokens.logprobs).detach())
    out = torch.zeros_like(shift, dtype=torch.bool)
    if options.sequence_band is not None:
        low, high = options.sequence_band
        out |= ((-shift).exp() < low) | ((-shift).exp() > high)
    if options.negative_shift is not None:
        out |= (tokens.row_means(tokens.advantages) < 0) & (shift > options.negative_shift)
    return out[tokens.owners]
