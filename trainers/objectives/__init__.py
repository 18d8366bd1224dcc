"""Objectives: each a small pure function of action tokens; `OBJECTIVES` names them, `evaluate` puts a loss together."""

import torch

from schemas.settings import Objective
from trainers.objectives.cispo import cispo
from trainers.objectives.dpo import dpo
from trainers.objectives.grpo import grpo
from trainers.objectives.gspo import gspo
from trainers.objectives.kl import ESTIMATORS
from trainers.objectives.masks import off_policy
from trainers.objectives.ppo import ppo
from trainers.objectives.reinforce import reinforce
from trainers.objectives.sft import sft
from trainers.objectives.terms import ActionTokens, Loss, Terms, Variant, importance_ratio

OBJECTIVES: dict[str, Variant] = {
    "grpo": grpo,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    "reinforce": reinforce,
    "dpo": dpo,
    "sft": sft,
}
OWN_MEAN = frozenset({"dpo", "sft"})
"""Objectives that bring their own mean, over pairs or successes; aggregation and masks are not for them."""


def evaluate(tokens: ActionTokens, weights: torch.Tensor, options: Objective, kl: float) -> Terms:
    """The terms of `options` with the KL coefficient `kl`, relative to a mean over all action tokens.

    Args:
        tokens: a micro-batch.
        weights: of the tokens, [n], from one of AGGREGATIONS.
        options: which objective, what is mixed in, masks, where KL enters.
        kl: the coefficient now; it differs from `options.kl` where it adapts.
    """
    ratio = importance_ratio(tokens.logprobs, tokens.behavior_logprobs).detach()
    penalty = torch.zeros_like(tokens.logprobs)
    if tokens.ref_logprobs is not None:
        penalty = ESTIMATORS[options.kl_estimator](tokens.logprobs, tokens.ref_logprobs)
    loss, clipped = torch.zeros_like(tokens.logprobs), torch.zeros_like(tokens.logprobs, dtype=torch.bool)
    if options.kl_in == "reward":
        tokens = tokens.penalized(kl * penalty.detach())
    else:
        loss = loss + kl * penalty * weights
    masked = off_policy(tokens, options)
    for name, share in {options.name: 1.0, **options.mixture}.items():
        part = _without(OBJECTIVES[name](tokens, options), weights, masked, name)
        loss = loss + share * part.values
        clipped = clipped | part.clipped if name == options.name else clipped
    return Terms(loss, ratio, clipped, penalty.detach())


def _without(loss: Loss, weights: torch.Tensor, masked: torch.Tensor, name: str) -> Loss:
    """`loss` as its share of the batch's mean, zero where a mask takes a row out."""
    if name in OWN_MEAN:
        return loss
    return Loss(torch.where(masked, 0.0, loss.values * weights), loss.clipped | masked)


__all__ = ["OBJECTIVES", "ActionTokens", "Loss", "Terms", "evaluate"]
