"""The clipped surrogate that GRPO, PPO and GSPO share."""

import torch
from torch import Tensor


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A) [n], and where the clip cuts its gradient.

    Source: PPO (arXiv 1707.06347), equation 7; an upper bound of its own: DAPO (arXiv 2503.14476), equation 8.
    """
    bounded = ratio.clamp(1 - low, 1 + high)
    cut = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    return torch.minimum(ratio * advantages, bounded * advantages), cut
