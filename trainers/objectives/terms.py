"""What an objective takes and gives: tensors over action tokens, not reduced, so that all splits sum to the same."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from schemas.settings import Objective

MAX_LOG_RATIO = 20.0
"""exp(20) is finite in float32 and in sums over a batch; beyond it a ratio says nothing more."""


@dataclass(frozen=True, slots=True)
class ActionTokens:
    """The n action tokens of `num_rows` trajectories, which lie one after the other, each in order.

    All tensors are [n]: float32 but for `owners`, int64, the row of each token. `behavior_logprobs` are of the policy
    that sampled, `proximal_logprobs` of the version published last (None unless the objective asks), `ref_logprobs` of
    the starting policy (None without a KL term). `success_weights` and `preferences` are the row's own, repeated: what
    `sft` and `dpo` multiply a token's logprob by.
    """

    logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    owners: Tensor
    num_rows: int
    ref_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    success_weights: Tensor | None = None
    preferences: Tensor | None = None

    def penalized(self, penalty: Tensor) -> "ActionTokens":
        """The same, with each token's advantage lowered by the `penalty` [n] of itself and all that follow it."""
        return replace(self, advantages=self.advantages - self.to_go(penalty))

    def row_sums(self, values: Tensor) -> Tensor:
        """Sums [num_rows] of `values` [n] over each row."""
        return torch.zeros(self.num_rows, dtype=values.dtype, device=values.device).index_add(0, self.owners, values)

    def row_means(self, values: Tensor) -> Tensor:
        """Means [num_rows] of `values` [n] over each row; 0 for a row without action tokens."""
        return self.row_sums(values) / self.row_sums(torch.ones_like(values)).clamp(min=1)

    def to_go(self, values: Tensor) -> Tensor:
        """At each token the sum [n] of `values` [n] from it to the end of its row."""
        exact = values.double()
        until_the_end = self.row_sums(exact).cumsum(0)[self.owners]  # of all rows up to the token's own
        return (until_the_end - exact.cumsum(0) + exact).to(values.dtype)


@dataclass(frozen=True, slots=True)
class Loss:
    """Per action token, [n]: what to minimize, and where a clip or a mask cuts its gradient."""

    values: Tensor
    clipped: Tensor


@dataclass(frozen=True, slots=True)
class Terms:
    """Per action token, [n]: what to minimize (`loss`), and what the metrics are made of (no gradient)."""

    loss: Tensor
    importance_ratio: Tensor
    clipped: Tensor
    kl: Tensor


Variant = Callable[[ActionTokens, Objective], Loss]
"""An objective: a pure function of action tokens and settings."""


def importance_ratio(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """exp(logprobs - behavior_logprobs), per token, kept finite."""
    return (logprobs - behavior_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def unclipped(values: Tensor) -> Loss:
    """`values` as a loss that nothing cuts."""
    return Loss(values, torch.zeros_like(values, dtype=torch.bool))
