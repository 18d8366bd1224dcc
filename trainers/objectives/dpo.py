"""Direct preference optimization on pairs of siblings: the best of a group over its worst."""

import torch
from torch import Tensor

from schemas.errors import SettingsError
from schemas.settings import Objective
from trainers.objectives.terms import ActionTokens, Loss, unclipped


def dpo(tokens: ActionTokens, options: Objective) -> Loss:
    """-p log pi, with p the row's preference (see `preferences`): the exact gradient, whatever the split.

    A pair's rows need not share a micro-batch: its margin is computed before, over the whole batch.
    """
    if tokens.preferences is None:
        raise SettingsError("objective dpo needs the preferences of rows")
    return unclipped(-tokens.preferences * tokens.logprobs)


def preferences(log_ratios: Tensor, chosen: Tensor, rejected: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Per row, [n]: d(-loss)/d(log pi) of the mean over p pairs, and the p losses.

    With m = log_ratios[chosen] - log_ratios[rejected], a pair's loss is -log sigmoid(beta m) and its gradient
    -beta sigmoid(-beta m) (grad log pi[chosen] - grad log pi[rejected]). Source: Rafailov et al. 2023
    (arXiv 2305.18290), equations 7 and 8.

    Args:
        log_ratios: log pi - log reference, summed over each row's action tokens, [n].
        chosen: rows that are preferred, int64 [p].
        rejected: rows that they are preferred to, int64 [p].
        beta: inverse temperature of the preference.
    """
    margins = beta * (log_ratios[chosen] - log_ratios[rejected])
    pull = beta * torch.sigmoid(-margins) / max(len(chosen), 1)
    rows = torch.zeros_like(log_ratios).index_add(0, chosen, pull).index_add(0, rejected, -pull)
    return rows, -torch.nn.functional.logsigmoid(margins)
