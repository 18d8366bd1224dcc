"""An engine whose work counts as busy time, within a budget of tokens; and one that only says why it does not work."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from inference.engines.base import Engine, EngineError, Generation


class Meter(Protocol):
    """What is needed of `infra.usage.Usage`."""

    def busy(self) -> AbstractContextManager[None]: ...


class TokenBudget:
    """Tokens that requests may take up at once, given out in the order of asking.

    Episodes alone bound nothing: a hundred short contexts fit where a hundred long ones evict one another's cache.
    """

    def __init__(self, num_tokens: int) -> None:
        self._limit = self._free = num_tokens
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_spent(self) -> bool:
        """Whether requests wait for others to end."""
        return any(not turn.done() for _, turn in self._waiting)

    @asynccontextmanager
    async def hold(self, num_tokens: int) -> AsyncGenerator[None]:
        """Take `num_tokens` for the time inside, as soon as they are free; more than all there are count as all."""
        num_tokens = min(num_tokens, self._limit)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((num_tokens, turn))
        self._deal()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += num_tokens
            turn.cancel()
            self._deal()

    def _deal(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._free):
            num_tokens, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= num_tokens
                turn.set_result(None)


class MeteredEngine:
    """`engine`, an `Engine` again; it is busy while any request is with it. Overlapping requests count once.

    A request that waits for tokens of the budget, or for a card that is shared, is not with it yet.
    """

    def __init__(self, engine: Engine, meter: Meter, budget: TokenBudget) -> None:
        self._engine, self._meter, self._budget = engine, meter, budget

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    @property
    def busy_s(self) -> float:
        return self._engine.busy_s

    @property
    def fault(self) -> str:
        return self._engine.fault

    async def ready(self, session: str) -> None:
        await self._engine.ready(session)

    async def generate(
        self, session: str, token_ids: Sequence[int], *, max_new_tokens: int, **sampling: Any
    ) -> Generation:
        async with self._budget.hold(len(token_ids) + max_new_tokens):
            await self.ready(session)
            with self._meter.busy():
                return await self._engine.generate(session, token_ids, max_new_tokens=max_new_tokens, **sampling)

    def release(self, session: str) -> None:
        self._engine.release(session)

    async def load(self, version: int, folder: Path) -> None:
        await self._engine.load(version, folder)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self._engine.score(token_ids)

    async def close(self) -> None:
        await self._engine.close()


class RefusingEngine(MeteredEngine):
    """`engine`, but for requests: they fail with `reason`, so that the episode's row has its prompt and says why."""

    def __init__(self, engine: Engine, meter: Meter, budget: TokenBudget, reason: str) -> None:
        super().__init__(engine, meter, budget)
        self._reason = reason

    async def generate(self, *_: Any, **__: Any) -> Generation:
        """Refuse.

        Raises:
            EngineError: always.
        """
        raise EngineError(self._reason)
