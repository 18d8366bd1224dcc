"""An engine whose work counts as busy time, and one that only says why it does not work."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from inference.engines.base import Engine, EngineError, Generation


class Meter(Protocol):
    """What is needed of `infra.usage.Usage`."""

    def busy(self) -> AbstractContextManager[None]: ...


class MeteredEngine:
    """`engine`; it is busy while any request is with it. Overlapping requests count once."""

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self._engine, self._meter = engine, meter

    @property
    def weight_version(self) -> int:
        """See `Engine.weight_version`."""
        return self._engine.weight_version

    @property
    def busy_s(self) -> float:
        """See `Engine.busy_s`."""
        return self._engine.busy_s

    async def generate(
        self,
        session: str,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int,
    ) -> Generation:
        """See `Engine.generate`."""
        with self._meter.busy():
            return await self._engine.generate(
                session,
                token_ids,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                stop_ids=stop_ids,
                seed=seed,
            )

    def release(self, session: str) -> None:
        """See `Engine.release`."""
        self._engine.release(session)

    async def load(self, version: int, folder: Path) -> None:
        """See `Engine.load`."""
        await self._engine.load(version, folder)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.score`."""
        return await self._engine.score(token_ids)

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._engine.close()


class RefusingEngine(MeteredEngine):
    """`engine`, but for requests: they fail with `reason`, so that the episode's row has its prompt and says why."""

    def __init__(self, engine: Engine, meter: Meter, reason: str) -> None:
        super().__init__(engine, meter)
        self._reason = reason

    async def generate(
        self,
        session: str,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int,
    ) -> Generation:
        """Refuse.

        Raises:
            EngineError: always.
        """
        raise EngineError(self._reason)
