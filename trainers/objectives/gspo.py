"""GSPO: one importance ratio a sequence."""

from schemas.settings import Objective
from trainers.objectives.surrogate import clipped_surrogate
from trainers.objectives.terms import MAX_LOG_RATIO, ActionTokens, Loss


def gspo(tokens: ActionTokens, options: Objective) -> Loss:
    """-min(s A, clip(s, 1 - clip, 1 + clip_high) A) at each token, with s = exp(mean log ratio) of its sequence.

    A token's own gradient flows through s / T as through a token ratio of value s, which allows one advantage per token
    (the form GSPO-token). Clips are far narrower than a token's: 3e-4 and 4e-4 in the source; its mean is the
    aggregation `sequence`. Source: Zheng et al. 2025 (arXiv 2507.18071), equations 7 and 13.
    """
    log_ratio = tokens.logprobs - tokens.behavior_logprobs
    mean = tokens.row_means(log_ratio.detach())[tokens.owners].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = mean.exp() * (tokens.logprobs - tokens.logprobs.detach()).exp()
    surrogate, cut = clipped_surrogate(ratio, tokens.advantages, options.clip, options.upper_clip)
    return Loss(-surrogate, cut)
