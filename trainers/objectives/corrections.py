"""What is done to an importance ratio that multiplies a gradient, so that no token can outweigh a batch."""

from collections.abc import Callable

import torch
from torch import Tensor

from schemas.settings import Objective


def none(ratio: Tensor, options: Objective) -> Tensor:
    """1 everywhere: as if the samples were the policy's own."""
    return torch.ones_like(ratio)


def unbounded(ratio: Tensor, options: Objective) -> Tensor:
    """The ratio itself: unbiased, of unbounded variance."""
    return ratio


def truncate(ratio: Tensor, options: Objective) -> Tensor:
    """min(ratio, ratio_cap). Source: Ionides 2008, "Truncated importance sampling"; IMPALA (arXiv 1802.01561)."""
    return ratio.clamp(max=options.ratio_cap)


def mask(ratio: Tensor, options: Objective) -> Tensor:
    """The ratio where 1 / ratio_cap <= ratio <= ratio_cap, else 0. Source: IcePop (Ring-1T, arXiv 2510.18855)."""
    inside = (ratio >= 1 / options.ratio_cap) & (ratio <= options.ratio_cap)
    return torch.where(inside, ratio, torch.zeros_like(ratio))


CORRECTIONS: dict[str, Callable[[Tensor, Objective], Tensor]] = {
    "none": none,
    "unbounded": unbounded,
    "truncate": truncate,
    "mask": mask,
}
