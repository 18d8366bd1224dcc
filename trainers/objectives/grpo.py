"""Group relative policy optimization, off-policy: the ratio is against the policy that sampled."""

import torch
from torch import Tensor

from trainers.objectives.terms import Terms, importance_ratio, k3


def grpo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    ref_logprobs: Tensor | None,
    *,
    clip: float,
    clip_high: float,
    kl: float,
) -> Terms:
    """Loss per action token: -min(r A, clip(r, 1 - clip, 1 + clip_high) A) + kl * k3, with r the importance ratio.

    `advantages` repeats each trajectory's advantage over its tokens. The caller sums over all action tokens of the
    global batch and divides once by their number, so long answers are not favored and every split agrees. A token
    counts as clipped where the clip cuts its gradient. Source: PPO (arXiv 1707.06347), equation 7; GRPO
    (arXiv 2402.03300), equation 3; token mean and clip_high: DAPO (arXiv 2503.14476), equation 8.
    """
    ratio = importance_ratio(logprobs, behavior_logprobs)
    bounded = ratio.clamp(1 - clip, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    penalty = k3(logprobs, ref_logprobs) if ref_logprobs is not None else torch.zeros_like(logprobs)
    cut = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip))
    return Terms(kl * penalty - surrogate, ratio.detach(), cut, penalty.detach())
