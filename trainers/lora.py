"""Low-rank adapters: chosen linear layers learn a small difference, all other weights stay as they were.

Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1. What they and the policy make together is computed by
`infra.weight_adapters.merged`, here as in every reader of the weight store, so that all have the same bits.
"""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from infra import weight_adapters
from infra.weight_adapters import DOWN, SCALE, UP, Values
from schemas.errors import SettingsError
from schemas.settings import Learner

BASE = "base.weight"


class Adapted(nn.Module):
    """y = W x + alpha / rank B A x, with A [rank, in] random and B [out, rank] 0 at first: nothing changes yet."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.base, self.scale, self.is_on = base, alpha / rank, True
        self.merged: tuple[Tensor, Tensor | None] | None = None
        self.lora_A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, with the adapter where it is on, or by `merged` weight and bias where there are."""
        if self.merged is not None:
            weight, bias = self.merged
            return nn.functional.linear(x, weight.to(x), None if bias is None else bias.to(x))
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
        SettingsError: a target names no linear layer, or one that shares its weight with the embeddings.
    """
    model.requires_grad_(False)
    places = [(parent, name, layer) for parent in [*model.modules()] for name, layer in parent.named_children()]
    found = [(p, n, x) for p, n, x in places if n in learner.lora_targets and isinstance(x, nn.Linear)]
    if missing := sorted(set(learner.lora_targets) - {name for _, name, _ in found}):
        raise SettingsError(
            f"learner.lora_targets names {missing}, which are no linear layers of a {model.config.model_type!r}; "
            f"it has {sorted({n for _, n, x in places if isinstance(x, nn.Linear)})}"
        )
    if tied := [name for _, name, layer in found if layer.weight is model.get_input_embeddings().weight]:
        raise SettingsError(
            f"learner.lora_targets names {tied}, whose weight is that of the embeddings, which has no adapter"
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


@contextmanager
def put_in(model: nn.Module, tensors: Mapping[str, Tensor]) -> Generator[None]:
    """The model as readers have it while inside: its adapters merged into `tensors`, which `merged` made of it."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, Adapted)]
    for name, layer in layers:
        layer.merged = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    try:
        yield
    finally:
        for _, layer in layers:
            layer.merged = None


def write_adapters(tensors: Mapping[str, Tensor], scale: float, into: Path) -> None:
    """Write the adapters among `tensors` as the weight store takes them."""
    found = {n: x.detach().contiguous().cpu() for n, x in tensors.items() if n.endswith((f".{DOWN}", f".{UP}"))}
    save_file(found | {SCALE: torch.tensor(scale, dtype=torch.float32)}, into)


def merged(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The weights of an ordinary model out of those of one with adapters; what was merged is on the CPU."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(f".{BASE}"):
            layer = name.removesuffix(BASE)
            weight, down, up = (_values(x) for x in (tensor, tensors[layer + DOWN], tensors[layer + UP]))
            whole[f"{layer}weight"] = _tensor(weight_adapters.merged(weight, down, up, scale))
        elif not name.endswith((f".{DOWN}", f".{UP}")):
            whole[name.replace(".base.bias", ".bias")] = tensor
    return whole


def _values(tensor: Tensor) -> Values:
    plain = tensor.detach().cpu().contiguous()
    return plain.view(torch.int16).numpy().view(np.uint16) if plain.dtype == torch.bfloat16 else plain.numpy()


def _tensor(values: Values) -> Tensor:
    is_bfloat16 = values.dtype == np.uint16
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(values)
