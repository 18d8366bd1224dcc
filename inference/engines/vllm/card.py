"""The card of a server: its own, or shared with the learner, on which the two take turns.

A shared card is the server's while a call or an episode needs it. Soon after the last one the server is put to sleep,
which moves its weights into the machine's memory and drops its KV cache, and the learner may have the card.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Protocol

from inference.engines.base import EngineError
from infra.turns import Turn
from infra.waits import WAITS

_POLL_S = 0.05
_IDLE_S = 0.5
"""Episodes begin one after the other; a server that is idle for less stays awake."""
_TURN_WAIT_S = 300.0


class Sleeper(Protocol):
    """What is needed of `inference.engines.vllm.client.Client`."""

    async def sleep(self, limit_s: float) -> None: ...
    async def wake_up(self, limit_s: float) -> None: ...


class Card:
    """Counts who needs the card, and takes turns on it; without a `turn` it does nothing.

    Attributes:
        fault: Why the server must be started anew: it did not fall asleep, or not wake up, within `limit_s`.
    """

    def __init__(self, turn: Turn | None, limit_s: float) -> None:
        self.fault = ""
        self._turn, self._limit_s = turn, limit_s
        self._lock = asyncio.Lock()
        self._calls, self._sessions = 0, set[str]()
        self._used_at = time.monotonic()
        self._asleep: Sleeper | None = None

    @contextlib.asynccontextmanager
    async def needed(self, session: str = "") -> AsyncGenerator[None]:
        """The card is the server's, and the server awake, inside; with a `session` until that is released.

        Raises:
            EngineError: the learner keeps the card, or the server does not wake up.
        """
        self._calls += 1
        self._sessions |= {session} - {""}
        try:
            if self._turn is not None:
                async with self._lock:
                    await self._take(self._turn)
            yield
        finally:
            self._calls -= 1
            self._used_at = time.monotonic()

    def release(self, session: str) -> None:
        """`session` needs it no more."""
        self._sessions.discard(session)
        self._used_at = time.monotonic()

    async def rest(self, server: Sleeper) -> None:
        """Put `server` to sleep whenever nobody needs the card, until there is a fault."""
        while self._turn is not None and not self.fault:
            await asyncio.sleep(_POLL_S)
            async with self._lock:
                if self._asleep is None and self._is_idle():
                    await self._leave(self._turn, server)

    async def forget(self) -> None:
        """The server is another one from now on, once what was asked of the one before is answered or has failed."""
        async with self._lock:
            self.fault, self._asleep = "", None

    def gone(self) -> None:
        """There is no server any more that would use the card."""
        self._asleep = None
        if self._turn is not None:
            self._turn.release()

    def _is_idle(self) -> bool:
        return not self._calls and not self._sessions and time.monotonic() - self._used_at >= _IDLE_S

    async def _leave(self, turn: Turn, server: Sleeper) -> None:
        try:
            await server.sleep(self._limit_s)
        except EngineError as error:
            self.fault = f"the server did not fall asleep: {error}"
            return
        self._asleep = server
        turn.release()

    async def _take(self, turn: Turn) -> None:
        with WAITS.on("the learner to leave the card", _TURN_WAIT_S, "the request fails") as wait:
            while not turn.take():
                wait.note("it trains, saves and publishes")
                if time.monotonic() - wait.since > _TURN_WAIT_S:
                    raise EngineError(f"the learner has had the card for {_TURN_WAIT_S:g} s (vllm.share_device)")
                await asyncio.sleep(_POLL_S)
        if self._asleep is not None:
            try:
                with WAITS.on("the vLLM server to wake up", self._limit_s, "it is started anew"):
                    await self._asleep.wake_up(self._limit_s)
            except EngineError as error:
                self.fault = f"the server did not wake up: {error}"
                raise
            self._asleep = None
