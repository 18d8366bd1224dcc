"""The policy: a causal language model in a Hugging Face folder, and the logprobs that it gives to tokens."""

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from schemas.errors import SettingsError
from schemas.settings import Policy

INITIALIZER_RANGE = 0.06
"""Of the tiny Llama: at the usual 0.02 a model this small learns far less in the same steps."""

_PLAIN_HEADS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Architectures whose logits are the output head's product with the last hidden state, with nothing in between."""

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt")
_KEPT = (".json", ".jinja", ".txt")


class Scorer(nn.Module):
    """Logprobs of chosen tokens under the distribution that the engine samples from, softmax(logits / temperature)."""

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.is_plain = model.config.model_type in _PLAIN_HEADS

    def forward(
        self, token_ids: Tensor, mask: Tensor, temperature: float | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Logprobs float32 [n] of the tokens `token_ids[:, 1:][mask]`, at `temperature` or the scorer's own.

        `token_ids` [b, t] is right-padded: under the causal mask padding changes nothing. `mask` is bool [b, t-1]:
        position j stands for token j + 1, which the logits of token j predict. Logits are only made where the mask is.
        `position_ids` [b, t] begin anew with each of several rows in a line; none sees another.
        """
        targets = token_ids[:, 1:][mask].long()
        inputs = packed_inputs(token_ids[:, :-1], position_ids)
        if self.is_plain:
            hidden = self.model.get_decoder()(**inputs).last_hidden_state
            logits = cast(nn.Module, self.model.get_output_embeddings())(hidden[mask])
        else:
            logits = self.model(**inputs).logits[mask]
        scaled = logits.float() / (temperature or self.temperature)
        return -nn.functional.cross_entropy(scaled, targets, reduction="none")


def packed_inputs(token_ids: Tensor, position_ids: Tensor | None) -> dict[str, Any]:
    """Arguments of a Hugging Face model for lines of one row each, or of several where there are `position_ids`.

    From those its attention makes a mask of blocks along the diagonal, if neither mask nor cache is given
    (`transformers.masking_utils.find_packed_sequence_indices`).
    """
    inputs: dict[str, Any] = {"input_ids": token_ids, "use_cache": False}
    return inputs if position_ids is None else inputs | {"position_ids": position_ids[:, : token_ids.shape[1]]}


def check_packing(scorer: Scorer) -> None:
    """Refuse a policy whose rows see one another when they are packed.

    Raises:
        SettingsError: the logprobs of a row depend on the row before it in its line.
    """
    ids, size = torch.arange(16)[None].repeat(2, 1), 8
    ids[1, :size] = 0
    mask = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    mask[:, :size] = False
    with torch.no_grad():
        one, other = scorer(ids, mask, position_ids=torch.arange(16).remainder(size).expand(2, -1)).chunk(2)
    if not torch.allclose(one, other, atol=1e-5):
        raise SettingsError(
            f"learner.packing is on, but in {scorer.model.config.model_type!r} a row's logprobs change by up to "
            f"{(one - other).abs().max():.2g} with the row before it in a line, expected not at all; turn it off"
        )


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Make the layers compute their activations again in the backward pass.

    Raises:
        SettingsError: the architecture cannot.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not model.supports_gradient_checkpointing or not layers:
        raise SettingsError(
            f"learner.activation_checkpointing is on, but {model.config.model_type!r} has no layers that can"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True  # a condition of theirs; what is inside them stays as it is, dropout off


@contextmanager
def in_float32(module: nn.Module) -> Generator[None]:
    """Compute in float32 with the weights as they are: each part's are widened while it computes, one at a time."""
    narrow: dict[nn.Parameter, Tensor] = {}

    def widen(part: nn.Module, _: object) -> None:
        for parameter in part.parameters(recurse=False):
            narrow[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(part: nn.Module, *_: object) -> None:
        for parameter in part.parameters(recurse=False):
            parameter.data = narrow.pop(parameter)

    parts = [part for part in module.modules() if any(True for _ in part.parameters(recurse=False))]
    hooks = [h for p in parts for h in (p.register_forward_pre_hook(widen), p.register_forward_hook(restore))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def tiny_llama(policy: Policy, vocabulary: int, stop_id: int, pad_id: int, seed: int) -> LlamaForCausalLM:
    """A Llama of a few hundred thousand parameters: heads of 32, untied embeddings, random weights from `seed`.

    Raises:
        SettingsError: `policy.hidden` is not a multiple of 32.
    """
    if policy.hidden % 32:
        raise SettingsError(f"policy.hidden {policy.hidden} is not a multiple of 32, the size of a head")
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=policy.hidden,
        num_attention_heads=policy.hidden // 32,
        num_key_value_heads=policy.hidden // 32,
        head_dim=32,
        intermediate_size=policy.intermediate,
        num_hidden_layers=policy.layers,
        max_position_embeddings=policy.max_positions,
        initializer_range=INITIALIZER_RANGE,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=pad_id,
        eos_token_id=stop_id,
        pad_token_id=pad_id,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def load_policy(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model in a Hugging Face folder.

    Raises:
        SettingsError: there is none, it is malformed, or it brings pickles or code in place of plain weights.
    """
    if not (folder / "config.json").exists():
        raise SettingsError(
            f"no policy in {folder}; expected a Hugging Face folder. Set policy.path, or make one with "
            "`python -m inference.demonstrate` and `python -m trainers.warm_start`"
        )
    disable_progress_bar()  # of no use in a log file
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise SettingsError(f"cannot load the policy in {folder}: {error}") from error


def export(model: PreTrainedModel, tensors: Mapping[str, Tensor], source: Path, into: Path) -> None:
    """Write `tensors` and `model`'s configuration to folder `into`, with tokenizer and templates of `source`."""
    into.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.name.endswith(_KEPT) and not file.name.endswith(_WEIGHTS) and file.name != "MANIFEST.json":
            shutil.copyfile(file, into / file.name)
    model.config.save_pretrained(into)
    save_file(_contiguous(model, tensors), into / "model.safetensors", {"format": "pt"})


def save_policy(model: PreTrainedModel, source: Path, into: Path, stop_id: int, pad_id: int) -> None:
    """Write a new policy as a Hugging Face folder, with the tokenizer files of `source`."""
    export(model, model.state_dict(), source, into)
    GenerationConfig(eos_token_id=stop_id, pad_token_id=pad_id, do_sample=True).save_pretrained(into)


def _contiguous(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a file can hold them: whole, on the CPU, a tied head left out (it is made from the embedding)."""
    tied = {"lm_head.weight"} if getattr(model.config, "tie_word_embeddings", False) else set[str]()
    return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items() if name not in tied}
