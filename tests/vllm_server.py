"""One real vLLM server for all tests that need one, and what it is compared with."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from inference.engines.base import EngineError, Generation
from inference.engines.llama import Llama
from inference.engines.vllm import command
from inference.engines.vllm.client import Client
from inference.engines.vllm.engine import VllmEngine
from inference.engines.vllm.process import LocalServer
from infra.turns import Turn
from schemas.settings import Vllm
from tests.policies import VOCABULARY, write_policy

MAX_TOKENS = 480
START_S = 600
TOLERANCE = 1e-4
"""Largest difference of a logprob, vLLM against torch in float32 on a CPU: kernels differ in the order of sums."""

needs_vllm = pytest.mark.skipif(
    not Path(command.interpreter(Vllm())).with_name("vllm").exists(), reason="no vLLM here; `make vllm` installs it"
)


@dataclass(frozen=True)
class Policies:
    """Versions 1 and 2 of one policy, with tied embeddings: the harder case for a reload in place."""

    folders: dict[int, Path]
    models: dict[int, Llama]


@dataclass(frozen=True)
class Running:
    """A server that is up, and the policies for it."""

    url: str
    policies: Policies

    def engine(self, folder: Path | None = None, version: int = 1, turn: Turn | None = None) -> VllmEngine:
        """An engine that takes the server over and serves `version`, of the policies or in `folder`."""
        return VllmEngine(
            folder or self.policies.folders[version],
            version,
            settings=Vllm(url=self.url, start_timeout_s=START_S),
            log=Path("unused"),
            max_tokens=MAX_TOKENS,
            threads=1,
            turn=turn,
        )


def write_policies(folder: Path) -> Policies:
    """Random weights."""
    folders = {v: write_policy(folder / f"v{v}", seed=v, tied=True) for v in (1, 2)}
    return Policies(folders, {v: Llama(f) for v, f in folders.items()})


def running(folder: Path) -> Iterator[Running]:
    """A server for as long as the generator lives."""
    policies = write_policies(folder)
    server = LocalServer(Vllm(), folder / "vllm.log", max_tokens=MAX_TOKENS, threads=1)
    try:
        url = server.start(policies.folders[1])
        asyncio.run(_wait_until_up(url, server))
        yield Running(url, policies)
    finally:
        server.stop()


async def _wait_until_up(url: str, server: LocalServer) -> None:
    client = Client(url)
    try:
        await client.wait_until_up(START_S, lambda: server.fault)
    finally:
        await client.close()


def prompt(seed: int, length: int = 40) -> list[int]:
    """Random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


async def say(engine: VllmEngine, ids: Sequence[int], number: int, **other: object) -> Generation:
    """Sample `number` tokens after `ids`."""
    options = {"temperature": 1.0, "stop_ids": (), "seed": 3, **other}
    return await engine.generate("s", ids, max_new_tokens=number, **options)  # type: ignore[arg-type]


def errors(generation: Generation, ids: Sequence[int], models: dict[int, Llama], shift: int = 0) -> list[float]:
    """Differences of each token's logprob from a fresh torch pass of the version in whose span it lies.

    `shift` moves every boundary between versions by so many tokens.
    """
    whole = [*ids, *generation.token_ids]
    expected = {v: models[v].logprobs(whole)[len(ids) - 1 :] for v in {s.version for s in generation.spans}}
    versions = [s.version for s in generation.spans for _ in range(s.start, s.end)]
    moved = [versions[min(max(i - shift, 0), len(versions) - 1)] for i in range(len(versions))]
    return [abs(lp - expected[v][i]) for i, (lp, v) in enumerate(zip(generation.logprobs, moved, strict=True))]


__all__ = [
    "MAX_TOKENS",
    "START_S",
    "TOLERANCE",
    "EngineError",
    "Running",
    "errors",
    "needs_vllm",
    "prompt",
    "running",
    "say",
]
