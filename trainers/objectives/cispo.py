"""CISPO: the importance ratio is clipped, never the gradient."""

from schemas.settings import Objective
from trainers.objectives.terms import ActionTokens, Loss, importance_ratio, unclipped


def cispo(tokens: ActionTokens, options: Objective) -> Loss:
    """-sg(clip(r, 1 - clip, 1 + clip_high)) A log pi: every token keeps a gradient, also rare and decisive ones.

    Recommended: clip 1.0, clip_high 4.0. Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5.
    """
    ratio = importance_ratio(tokens.logprobs, tokens.behavior_logprobs)
    weight = ratio.clamp(1 - options.clip, 1 + options.upper_clip).detach()
    return unclipped(-weight * tokens.advantages * tokens.logprobs)
