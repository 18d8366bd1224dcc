"""The forward pass of Llama-architecture models, straight from a Hugging Face folder; float32, no autograd.

Written out rather than imported: `transformers` takes seconds to import and keeps its KV cache in a shape that rows
cannot join and leave. The tests compare it with `LlamaForCausalLM`.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from inference.engines.base import EngineError

Rows = slice | Tensor
"""Rows of the cache: a slice (a view) or their indices (a copy)."""


_LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "max_position_embeddings": 2**18,
}
"""Sizes that a config.json must have, and the largest that are believed: tables are made before weights disagree."""

_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError, SafetensorError)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the weights of a model must look like; two versions of one policy have equal shapes."""

    vocabulary: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    max_positions: int
    rope: tuple[float, ...]
    tied: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Shape":
        """The shape in a `config.json`.

        Raises:
            EngineError: an architecture, activation, bias or rope type that this engine does not compute.
        """
        _refuse_unknown(config)
        sizes = {name: _size(name, config.get(name), most) for name, most in _LARGEST.items()}
        heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
        head_dim = _size("head_dim", config.get("head_dim") or hidden // heads, 512)
        return cls(
            vocabulary=sizes["vocab_size"],
            hidden=hidden,
            mlp=sizes["intermediate_size"],
            layers=sizes["num_hidden_layers"],
            heads=heads,
            kv_heads=_size("num_key_value_heads", config.get("num_key_value_heads") or heads, heads),
            head_dim=head_dim,
            epsilon=float(config.get("rms_norm_eps", 1e-6)),
            max_positions=sizes["max_position_embeddings"],
            rope=tuple(_inverse_frequencies(config, head_dim)),
            tied=bool(config.get("tie_word_embeddings", False)),
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block, with the projections that share an input fused."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Llama:
    """One set of weights. Immutable: a new version is a new object."""

    def __init__(self, folder: Path):
        """Read `config.json` and every `*.safetensors` of `folder`.

        Raises:
            EngineError: a file is missing or malformed, or the model is not one that this engine computes.
        """
        try:
            self.shape = Shape.of(json.loads((folder / "config.json").read_text()))
            files = sorted(folder.glob("*.safetensors"))
            weights = {k: v.to(torch.float32, copy=True) for f in files for k, v in load_file(f).items()}
            self._take(weights)
        except _MALFORMED as error:
            raise EngineError(f"cannot serve {folder}: {type(error).__name__}: {error}") from error

    def _take(self, weights: dict[str, Tensor]) -> None:
        s = self.shape
        self.embedding = _expect(weights, "model.embed_tokens.weight", (s.vocabulary, s.hidden))
        self.norm = _expect(weights, "model.norm.weight", (s.hidden,))
        self.head = self.embedding if s.tied else _expect(weights, "lm_head.weight", (s.vocabulary, s.hidden))
        self.layers = [_layer(weights, f"model.layers.{i}.", s) for i in range(s.layers)]
        angles = torch.outer(torch.arange(s.max_positions).float(), torch.tensor(s.rope))
        self._cos = torch.cat([angles.cos(), angles.cos()], -1)
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1)  # sign of rotate_half folded in

    def cache(self, num_rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Empty keys and values of each layer: [num_rows, kv_heads, length, head_dim]."""
        size = (num_rows, self.shape.kv_heads, length, self.shape.head_dim)
        return [(torch.zeros(size), torch.zeros(size)) for _ in self.layers]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, cache: list[tuple[Tensor, Tensor]], rows: Rows) -> Tensor:
        """Read `tokens` into the cache; returns the last layer's hidden states, normed.

        Args:
            tokens: Token ids [R, C].
            positions: Their positions [R, C], increasing within a row; what lies after them in the cache is not read.
            cache: Keys and values, written in place.
            rows: The R cache rows.

        Returns:
            [R, C, hidden].
        """
        view = self._view(positions, rows)
        x = self.embedding[tokens]
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            x = x + F.linear(self._attend(self._qkv(layer, x, view), keys, values, view), layer.output)
            gate, up = F.linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return self._normed(x, self.norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., hidden]."""
        return F.linear(hidden, self.head)

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int]) -> list[float]:
        """Logprobs of token_ids[1:], each given the tokens before it, at temperature 1."""
        tokens = torch.tensor([token_ids])
        positions = torch.arange(len(token_ids)).unsqueeze(0)
        hidden = self.forward(tokens, positions, self.cache(1, len(token_ids)), slice(0, 1))
        logprobs = self.logits(hidden[0, :-1]).log_softmax(-1)
        return logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()

    def _view(self, positions: Tensor, rows: Rows) -> "_View":
        num_rows, width = positions.shape
        length = int(positions.max()) + 1
        hidden_from = torch.arange(length) > positions.unsqueeze(-1)
        mask = torch.zeros(hidden_from.shape).masked_fill_(hidden_from, -math.inf)
        return _View(
            rows=rows,
            index=(torch.arange(num_rows) if isinstance(rows, slice) else rows).unsqueeze(1),
            positions=positions,
            length=length,
            mask=mask.view(num_rows, 1, 1, width, length),
            cos=self._cos[positions].unsqueeze(2),
            sin=self._sin[positions].unsqueeze(2),
        )

    def _qkv(self, layer: Layer, x: Tensor, view: "_View") -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: [R, C, heads or kv_heads, head_dim]."""
        s = self.shape
        fused = F.linear(self._normed(x, layer.attention_norm), layer.qkv)
        fused = fused.view(*x.shape[:2], s.heads + 2 * s.kv_heads, s.head_dim)
        qk, v = fused.split([s.heads + s.kv_heads, s.kv_heads], 2)
        qk = torch.addcmul(qk * view.cos, qk.roll(s.head_dim // 2, -1), view.sin)
        return qk[:, :, : s.heads], qk[:, :, s.heads :], v

    def _attend(self, qkv: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, view: "_View") -> Tensor:
        """Attention of each row over its own part of the cache: [R, C, heads * head_dim]."""
        s, (q, k, v) = self.shape, qkv
        num_rows, width = view.positions.shape
        keys[view.index, :, view.positions] = k
        values[view.index, :, view.positions] = v
        known_k, known_v = keys[view.rows, :, : view.length], values[view.rows, :, : view.length]
        group = s.heads // s.kv_heads
        q = q.transpose(1, 2).reshape(num_rows, s.kv_heads, group * width, s.head_dim)
        scores = (q @ known_k.transpose(-1, -2)) * s.head_dim**-0.5
        scores = scores.view(num_rows, s.kv_heads, group, width, view.length) + view.mask
        mixed = scores.softmax(-1).view(num_rows, s.kv_heads, group * width, view.length) @ known_v
        mixed = mixed.view(num_rows, s.heads, width, s.head_dim)
        return mixed.transpose(1, 2).reshape(num_rows, width, s.heads * s.head_dim)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.hidden,), weight, self.shape.epsilon)


@dataclass(frozen=True, slots=True)
class _View:
    """What every layer of one forward pass shares. `mask` is 0 where a token may look, -inf elsewhere."""

    rows: Rows
    index: Tensor
    positions: Tensor
    length: int
    mask: Tensor
    cos: Tensor
    sin: Tensor


def _size(name: str, value: Any, most: int) -> int:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise EngineError(f"config.json says {name} {str(value)[:40]}; expected a whole number from 1 to {most}")
    return value


def _expect(weights: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if tuple(weights[name].shape) != shape:
        raise EngineError(f"{name} has shape {tuple(weights[name].shape)}; config.json says {shape}")
    return weights[name]


def _layer(weights: dict[str, Tensor], prefix: str, s: Shape) -> Layer:
    queries, values = (s.heads * s.head_dim, s.hidden), (s.kv_heads * s.head_dim, s.hidden)

    def expect(name: str, *shape: int) -> Tensor:
        return _expect(weights, f"{prefix}{name}.weight", shape)

    qkv = [expect(f"self_attn.{n}_proj", *(queries if n == "q" else values)) for n in "qkv"]
    return Layer(
        attention_norm=expect("input_layernorm", s.hidden),
        qkv=torch.cat(qkv),
        output=expect("self_attn.o_proj", s.hidden, s.heads * s.head_dim),
        mlp_norm=expect("post_attention_layernorm", s.hidden),
        gate_up=torch.cat([expect(f"mlp.{n}_proj", s.mlp, s.hidden) for n in ("gate", "up")]),
        down=expect("mlp.down_proj", s.hidden, s.mlp),
    )


def _refuse_unknown(config: dict[str, Any]) -> None:
    found = {
        "model_type": (config.get("model_type"), ("llama",)),
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (config.get("attention_bias", False), (False, None)),
        "mlp_bias": (config.get("mlp_bias", False), (False, None)),
    }
    for name, (observed, expected) in found.items():
        if observed not in expected:
            raise EngineError(f"{name} is {observed!r}; the torch engine computes {expected[0]!r} only")


def _inverse_frequencies(config: dict[str, Any], head_dim: int) -> list[float]:
    """RoPE frequencies of each pair of dimensions (Su et al. 2021, section 3.4.2), scaled as the config says."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
    plain = [theta ** (-i / head_dim) for i in range(0, head_dim, 2)]
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return plain
    if kind == "linear":
        return [f / rope["factor"] for f in plain]
    if kind == "llama3":
        return [_llama3(f, rope) for f in plain]
    raise EngineError(f"rope_type {kind!r}; the torch engine computes default, linear and llama3")


def _llama3(frequency: float, rope: dict[str, Any]) -> float:
    """Llama 3.1's scaling: long waves slowed by `factor`, short ones kept, a linear blend between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    blend = min(1.0, max(0.0, (turns - low) / (high - low)))
    return frequency * (blend + (1 - blend) / rope["factor"])
