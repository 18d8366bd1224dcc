"""What an objective takes and gives: tensors over tokens, not reduced: all splits of a batch sum to the same."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is finite in float32 and in sums over a batch; beyond it a ratio says nothing more."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Per action token, shape [n]: what to minimize (`loss`), and what the metrics are made of (no gradient)."""

    loss: Tensor
    importance_ratio: Tensor
    clipped: Tensor
    kl: Tensor


class Objective(Protocol):
    """A pure function of action tokens; all tensors have shape [n]."""

    def __call__(
        self,
        logprobs: Tensor,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        ref_logprobs: Tensor | None,
        *,
        clip: float,
        clip_high: float,
        kl: float,
    ) -> Terms: ...


def importance_ratio(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """exp(logprobs - behavior_logprobs), per token, kept finite."""
    return (logprobs - behavior_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) per sampled token: exp(d) - 1 - d with d = ref_logprobs - logprobs; never negative.

    Source: Schulman 2020, "Approximating KL divergence", estimator k3; GRPO (arXiv 2402.03300), equation 4.
    """
    d = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d.exp() - 1 - d
