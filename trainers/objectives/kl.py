"""KL to the reference policy: estimators per sampled token, and a coefficient that seeks a target."""

from torch import Tensor

from trainers.objectives.terms import MAX_LOG_RATIO

ADAPT_GAIN, ADAPT_LIMIT = 0.1, 0.2
"""A step changes the coefficient by at most 2 %."""


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(policy / reference): unbiased, of either sign. Source: Schulman 2020, "Approximating KL divergence"."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(policy / reference)^2 / 2: biased, small variance, its gradient is the KL's. Source: as k1."""
    return (logprobs - ref_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(d) - 1 - d with d = ref_logprobs - logprobs: unbiased and never negative.

    Source: as k1; GRPO (arXiv 2402.03300), equation 4.
    """
    d = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d.exp() - 1 - d


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def adapted(coefficient: float, kl: float, target: float | None) -> float:
    """The coefficient after a step whose mean KL per token was `kl`, as given where there is no target.

    coefficient * (1 + 0.1 clip(kl / target - 1, -0.2, 0.2)). Source: Ziegler et al. 2019 (arXiv 1909.08593), section
    2.2.
    """
    if target is None:
        return coefficient
    return coefficient * (1 + ADAPT_GAIN * min(max(kl / target - 1, -ADAPT_LIMIT), ADAPT_LIMIT))
