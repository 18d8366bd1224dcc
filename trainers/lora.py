"""Low-rank adapters: chosen linear layers learn a small difference, all other weights stay as they were.

Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1.
"""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel

from schemas.errors import SettingsError
from schemas.settings import Learner

BASE, DOWN, UP = "base.weight", "lora_A", "lora_B"


class Adapted(nn.Module):
    """y = W x + alpha / rank B A x, with A [rank, in] random and B [out, rank] 0 at first: nothing changes yet."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.base, self.scale, self.is_on = base, alpha / rank, True
        self.lora_A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, with the adapter where it is on."""
        if not self.is_on:
            return self.base(x)
        low = nn.functional.linear(x, self.lora_A)
        return self.base(x) + self.scale * nn.functional.linear(low, self.lora_B)


def description(learner: Learner) -> str:
    """What has to be alike for adapters to be taken up; empty without."""
    if not learner.lora_rank:
        return ""
    return f"rank {learner.lora_rank}, alpha {learner.lora_alpha:g}, {' '.join(sorted(learner.lora_targets))}"


def check_alike(adapters: str, learner: Learner, checkpoint: str) -> None:
    """Refuse a checkpoint with other adapters than `learner` has: their weights would mean something else.

    Raises:
        SettingsError: `adapters`, their description there, is not the one here.
    """
    if adapters != (asked := description(learner)):
        raise SettingsError(
            f"checkpoint {checkpoint} has adapters {adapters or 'none'!r}, the settings ask for {asked or 'none'!r}; "
            "set learner.lora_* back, or start a new run whose policy.path is the checkpoint's folder `policy`"
        )


def adapt(model: PreTrainedModel, learner: Learner) -> None:
    """Freeze `model`, and give adapters of `learner.lora_rank` to its linear layers named in `learner.lora_targets`.

    Raises:
        SettingsError: a target names no linear layer.
    """
    model.requires_grad_(False)
    places = [(parent, name, layer) for parent in [*model.modules()] for name, layer in parent.named_children()]
    found = [(p, n, x) for p, n, x in places if n in learner.lora_targets and isinstance(x, nn.Linear)]
    if missing := sorted(set(learner.lora_targets) - {name for _, name, _ in found}):
        raise SettingsError(
            f"learner.lora_targets names {missing}, which are no linear layers of a {model.config.model_type!r}; "
            f"it has {sorted({n for _, n, x in places if isinstance(x, nn.Linear)})}"
        )
    for parent, name, layer in found:
        setattr(parent, name, Adapted(layer, learner.lora_rank, learner.lora_alpha))


@contextmanager
def switched_off(model: nn.Module) -> Generator[None]:
    """The model without its adapters while inside: the policy that training began with."""
    layers = [layer for layer in model.modules() if isinstance(layer, Adapted)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def merged(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The weights of an ordinary model out of those of one with adapters: W + scale B A, summed in float32."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(f".{BASE}"):
            layer = name.removesuffix(BASE)
            update = tensors[layer + UP].float() @ tensors[layer + DOWN].float()
            whole[f"{layer}weight"] = (tensor.float() + scale * update).to(tensor.dtype)
        elif not name.endswith((f".{DOWN}", f".{UP}")):
            whole[name.replace(".base.bias", ".bias")] = tensor
    return whole
