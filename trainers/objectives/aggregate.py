"""How tokens share a batch: each aggregation as a weight beside the mean over all action tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from trainers.objectives.terms import ActionTokens


def token_mean(tokens: ActionTokens, num_tokens: int, num_rows: int, longest: int) -> Tensor:
    """Every token of the global batch alike: long answers weigh more. Source: DAPO (arXiv 2503.14476), section 3.3."""
    return torch.ones_like(tokens.behavior_logprobs)


def sequence_mean(tokens: ActionTokens, num_tokens: int, num_rows: int, longest: int) -> Tensor:
    """Mean over rows of the mean over a row's tokens. Source: GRPO (arXiv 2402.03300), equation 3."""
    counts = tokens.row_sums(torch.ones_like(tokens.behavior_logprobs))
    return num_tokens / (num_rows * counts[tokens.owners])


def constant(tokens: ActionTokens, num_tokens: int, num_rows: int, longest: int) -> Tensor:
    """Sum over a row divided by one constant, the longest answer: length has no weight of its own.

    Source: Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783), section 3.1.
    """
    return torch.full_like(tokens.behavior_logprobs, num_tokens / (num_rows * longest))


AGGREGATIONS: dict[str, Callable[[ActionTokens, int, int, int], Tensor]] = {
    "token": token_mean,
    "sequence": sequence_mean,
    "constant": constant,
}
