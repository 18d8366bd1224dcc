"""Decoupled PPO: one policy sampled, another is the center of the trust region."""

from schemas.errors import SettingsError
from schemas.settings import Objective
from trainers.objectives.corrections import CORRECTIONS
from trainers.objectives.surrogate import clipped_surrogate
from trainers.objectives.terms import ActionTokens, Loss, importance_ratio


def ppo(tokens: ActionTokens, options: Objective) -> Loss:
    """-w min(r A, clip(r, 1 - clip, 1 + clip_high) A), with r = policy / proximal and w = proximal / behavior.

    The proximal policy is the weight version published last, so r is what this learner has changed since, and w what
    staleness and engine mismatch come to; `ratio_correction` bounds w. Source: Hilton et al. 2022 (arXiv 2110.00641),
    section 3; AReaL (arXiv 2505.24298), equation 5.
    """
    if tokens.proximal_logprobs is None:
        raise SettingsError("objective ppo needs the logprobs of the proximal policy")
    ratio = importance_ratio(tokens.logprobs, tokens.proximal_logprobs)
    surrogate, cut = clipped_surrogate(ratio, tokens.advantages, options.clip, options.upper_clip)
    raw = importance_ratio(tokens.proximal_logprobs, tokens.behavior_logprobs)
    weight = CORRECTIONS[options.ratio_correction](raw, options)
    return Loss(-weight * surrogate, cut | (weight == 0))
