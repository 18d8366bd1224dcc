"""Engines by name. A new engine is a module and a line here."""

from collections.abc import Callable
from pathlib import Path

from inference.engines.base import Engine


def make_engine(name: str, *, max_sessions: int, max_tokens: int, threads: int) -> Callable[[Path, int], Engine]:
    """A function (Hugging Face folder, version) -> engine.

    Args:
        name: A key of ENGINES (setting `rollout.engine`).
        max_sessions: Episodes that it holds at once.
        max_tokens: Longest context.
        threads: Of a forward pass, where it runs in this process.
    """
    make = ENGINES[name]
    return lambda folder, version: make(folder, version, max_sessions, max_tokens, threads)


def _torch(folder: Path, version: int, max_sessions: int, max_tokens: int, threads: int) -> Engine:
    from inference.engines.torch_engine import TorchEngine  # noqa: PLC0415 - torch is slow to import

    return TorchEngine(folder, version, max_sessions=max_sessions, max_tokens=max_tokens, threads=threads)


ENGINES: dict[str, Callable[[Path, int, int, int, int], Engine]] = {"torch": _torch}
