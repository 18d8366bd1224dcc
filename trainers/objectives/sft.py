"""Supervised learning on the same stream: say what successes said."""

from schemas.errors import SettingsError
from schemas.settings import Objective
from trainers.objectives.terms import ActionTokens, Loss, unclipped


def sft(tokens: ActionTokens, options: Objective) -> Loss:
    """-u log pi, with u the row's success weight: 0 for failures, else such that the mean is over successes' tokens."""
    if tokens.success_weights is None:
        raise SettingsError("objective sft needs the weights of successes")
    return unclipped(-tokens.success_weights * tokens.logprobs)
