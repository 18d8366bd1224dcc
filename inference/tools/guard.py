"""What stands before a tool's service: a rate, a number of calls at once, further tries, a circuit breaker."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TypeVar

from prometheus_client import Counter, Gauge

from inference.environments.base import Tool, ToolError, ToolUnavailable

T = TypeVar("T")

BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
BREAK_AFTER = 20
"""Failures in a row, over all episodes, after which a tool counts as down."""
COOL_S = 5.0
"""How long calls to a tool that is down fail at once; then one is let through to see."""

RETRIES = Counter("lagoon_tool_retries", "Tool calls that were tried again", ["tool"])
DOWN = Gauge("lagoon_tool_down", "1 while calls fail at once because the tool is down", ["tool"])


class Guard:
    """The limits of one tool's service, shared by all episodes of a process."""

    def __init__(self, name: str, tool: Tool, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._tool, self._clock = name, tool, clock
        self._places = asyncio.Semaphore(tool.max_concurrent) if tool.max_concurrent else nullcontext()
        self._free_at = float("-inf")
        self._failures, self._closed_until, self._reason = 0, float("-inf"), ""

    async def run(self, work: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """The result of `work` and the number of tries; waiting for one's turn is not in any try's limit.

        Raises:
            ToolUnavailable: the tool is down, or was unavailable at every try.
            Exception: what `work` raised.
        """
        for attempt in range(self._tool.retries + 1):
            try:
                return await self._once(work), attempt + 1
            except ToolUnavailable:
                if attempt == self._tool.retries or self._is_down:
                    raise
                RETRIES.labels(self._name).inc()
                await asyncio.sleep(random.random() * min(BACKOFF_S * 2**attempt, MAX_BACKOFF_S))
        raise AssertionError("the last try returns or raises")

    async def _once(self, work: Callable[[], Awaitable[T]]) -> T:
        async with self._places:
            await self._turn()
            self._admit()
            try:
                result = await work()
            except ToolError:
                self._answered()
                raise
            except Exception as error:
                self._failed(error)
                raise
            self._answered()
            return result

    async def _turn(self) -> None:
        """Wait for this call's turn at the tool's rate; up to a second's worth may come at once."""
        rate = self._tool.rate_per_s
        if rate is None:
            return
        now = self._clock()
        self._free_at = max(self._free_at, now - 1.0) + 1 / rate
        await asyncio.sleep(max(0.0, self._free_at - now))

    @property
    def _is_down(self) -> bool:
        return self._failures >= BREAK_AFTER

    def _admit(self) -> None:
        """Refuse the call while the tool is down; after COOL_S let one through and hold the others back."""
        if not self._is_down:
            return
        now = self._clock()
        if now < self._closed_until:
            wait_s = self._closed_until - now
            raise ToolUnavailable(
                f"tool {self._name} is down after {self._failures} failures in a row (last: {self._reason}); "
                f"it is tried again in {wait_s:.1f} s"
            )
        self._closed_until = now + COOL_S

    def _answered(self) -> None:
        self._failures = 0
        DOWN.labels(self._name).set(0)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._reason = f"{type(error).__name__}: {error}"[:200]
        if self._failures == BREAK_AFTER:
            self._closed_until = self._clock() + COOL_S
        DOWN.labels(self._name).set(float(self._is_down))
