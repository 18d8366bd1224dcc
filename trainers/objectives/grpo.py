"""Group relative policy optimization, off-policy: the ratio is against the policy that sampled."""

from schemas.settings import Objective
from trainers.objectives.surrogate import clipped_surrogate
from trainers.objectives.terms import ActionTokens, Loss, importance_ratio


def grpo(tokens: ActionTokens, options: Objective) -> Loss:
    """-min(r A, clip(r, 1 - clip, 1 + clip_high) A), with r the token's importance ratio.

    Source: GRPO (arXiv 2402.03300), equation 3; clip_high: DAPO (arXiv 2503.14476), equation 8.
    """
    ratio = importance_ratio(tokens.logprobs, tokens.behavior_logprobs)
    surrogate, cut = clipped_surrogate(ratio, tokens.advantages, options.clip, options.upper_clip)
    return Loss(-surrogate, cut)
