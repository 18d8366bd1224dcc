"""Engines by name. A new engine is a module and a line here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inference.engines.base import Engine
from infra.turns import Turn
from schemas.settings import Settings


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an engine is made for.

    Attributes:
        settings: Of the run; the limits are those of `[rollout]`.
        threads: Of a forward pass on a CPU.
        name: Whose engine it is; names the log of a server.
        turn: On a card that it shares.
    """

    settings: Settings
    threads: int
    name: str
    turn: Turn | None = None


def make_engine(engine: str, wanted: Wanted) -> Callable[[Path, int], Engine]:
    """A function (Hugging Face folder, version) -> engine; `engine` is a key of ENGINES (setting `rollout.engine`)."""
    make = ENGINES[engine]
    return lambda folder, version: make(folder, version, wanted)


def _torch(folder: Path, version: int, wanted: Wanted) -> Engine:
    from inference.engines.torch_engine import TorchEngine  # noqa: PLC0415 - torch is slow to import

    limits = wanted.settings.rollout
    return TorchEngine(
        folder, version, max_sessions=limits.max_episodes, max_tokens=limits.max_tokens, threads=wanted.threads
    )


def _vllm(folder: Path, version: int, wanted: Wanted) -> Engine:
    from inference.engines.vllm.engine import VllmEngine  # noqa: PLC0415 - not every run speaks HTTP

    limits = wanted.settings.rollout
    log = wanted.settings.run.folder / "logs" / f"vllm-{wanted.name}.log"
    return VllmEngine(
        folder,
        version,
        settings=wanted.settings.vllm,
        log=log,
        max_tokens=limits.max_tokens,
        threads=wanted.threads,
        turn=wanted.turn,
    )


ENGINES: dict[str, Callable[[Path, int, Wanted], Engine]] = {"torch": _torch, "vllm": _vllm}
