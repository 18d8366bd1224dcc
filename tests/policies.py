"""Policies for tests: a randomly initialised Llama in a folder, and an engine that says what a script says."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from inference.engines.base import Generation
from infra.stack.policy import check_packages, prepare_policy
from schemas.settings import load
from schemas.trajectory import WeightVersionSpan

VOCABULARY = 304


def write_policy(
    folder: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2, mlp: int = 192, tied: bool = False
) -> Path:
    """A Hugging Face folder with random weights, of the default demo's shape; heads of 32."""
    generator = torch.Generator().manual_seed(seed)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
        "head_dim": 32,
        "intermediate_size": mlp,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "rope_theta": 10000.0,
    }
    shapes = {"model.embed_tokens": (VOCABULARY, hidden), "model.norm": (hidden,)}
    shapes |= {} if tied else {"lm_head": (VOCABULARY, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{n}_proj": (hidden, hidden) for n in "qkvo"}
        shapes |= {f"{prefix}mlp.{n}_proj": (mlp, hidden) for n in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj": (hidden, mlp)}
        shapes |= {f"{prefix}{n}_layernorm": (hidden,) for n in ("input", "post_attention")}
    weights = {
        f"{name}.weight": torch.ones(s) if len(s) == 1 else torch.randn(s, generator=generator) * 0.1
        for name, s in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def smollm2() -> Path:
    """The folder of SmolLM2-135M, made where it is missing.

    Raises:
        SettingsError: it is not installed.
    """
    settings = load(overrides=["--policy.name=smollm2"])
    check_packages(settings)
    return prepare_policy(settings, print)


@dataclass
class ScriptedEngine:
    """Says the next line of its script, whatever it is asked; a line that is an exception is raised.

    Attributes:
        script: Token ids of each turn, or a function from the session's turn number to them.
        stop_id: Ends an action; a line without it ran into the limit.
        versions: Weight version of each token of each turn; 1 where nothing is given.
        prompts: What it was asked, turn by turn.
        hangs: Never answers.
    """

    script: Sequence[Sequence[int] | Exception] | Callable[[int], Sequence[int]]
    stop_id: int
    versions: Sequence[Sequence[int]] = ()
    hangs: bool = False
    weight_version: int = 1
    busy_s: float = 0.0
    fault: str = ""
    prompts: list[list[int]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    _turns: dict[str, int] = field(default_factory=dict)

    async def ready(self, session: str) -> None:
        pass

    async def generate(self, session: str, token_ids: Sequence[int], **_: object) -> Generation:
        self.prompts.append(list(token_ids))
        if self.hangs:
            await asyncio.Event().wait()
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        line = self.script(turn) if callable(self.script) else self.script[turn]
        if isinstance(line, Exception):
            raise line
        versions = self.versions[turn] if turn < len(self.versions) else [self.weight_version] * len(line)
        spans = tuple(WeightVersionSpan(i, i + 1, v) for i, v in enumerate(versions))
        return Generation(tuple(line), (-0.5,) * len(line), spans, line[-1] == self.stop_id)

    def release(self, session: str) -> None:
        self.released.append(session)

    async def load(self, version: int, folder: Path) -> None:
        self.weight_version = version

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [-0.5] * (len(token_ids) - 1)

    async def close(self) -> None:
        pass
