"""REINFORCE with a corrected importance ratio in front of the score function."""

from schemas.settings import Objective
from trainers.objectives.corrections import CORRECTIONS
from trainers.objectives.terms import ActionTokens, Loss, importance_ratio


def reinforce(tokens: ActionTokens, options: Objective) -> Loss:
    """-sg(c(r)) A log pi, with r the importance ratio, c the `ratio_correction`, sg without gradient.

    Source: Williams 1992, "Simple statistical gradient-following algorithms"; truncated: PipelineRL (arXiv 2509.19128),
    equation 3. With the correction `none` it is the naive gradient that takes every sample for the policy's own.
    """
    ratio = importance_ratio(tokens.logprobs, tokens.behavior_logprobs).detach()
    weight = CORRECTIONS[options.ratio_correction](ratio, options)
    return Loss(-weight * tokens.advantages * tokens.logprobs, weight == 0)
