"""Calls of many episodes in one request: what arrives within a small window goes together."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import Histogram

from inference.environments.base import Tool, ToolError
from inference.tools.within import within

BATCH_SIZE = Histogram(
    "lagoon_tool_batch_calls", "Tool calls that went in one request", ["tool"], buckets=(1, 2, 4, 8, 16, 32, 64, 128)
)

RunBatch = Callable[[Sequence[dict[str, Any]]], Awaitable[Sequence[str | ToolError]]]


class Merger:
    """Gathers calls of one batchable tool. A batch that hangs or fails concerns its own calls: later ones do not wait.

    The window opens with the first call; it closes after `tool.batch_window_s`, or at once with `tool.max_batch` calls.
    """

    def __init__(self, name: str, tool: Tool, run_batch: RunBatch, limit_s: float) -> None:
        self._name, self._tool, self._run_batch, self._limit_s = name, tool, run_batch, limit_s
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[str | ToolError]]] = []
        self._window: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, arguments: dict[str, Any]) -> str | ToolError:
        """The reply to one call.

        Raises:
            TimeoutError: the batch did not answer within its limit.
            Exception: what the batch raised.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str | ToolError] = loop.create_future()
        self._waiting.append((arguments, answer))
        if len(self._waiting) >= self._tool.max_batch:
            self._close()
        elif self._window is None:
            self._window = loop.call_later(self._tool.batch_window_s, self._close)
        return await answer

    def _close(self) -> None:
        """Send what waits; calls whose episode has ended stay out."""
        if self._window is not None:
            self._window.cancel()
            self._window = None
        batch, self._waiting = [(a, f) for a, f in self._waiting if not f.done()], []
        if batch:
            task = asyncio.get_running_loop().create_task(self._send(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _send(self, batch: list[tuple[dict[str, Any], "asyncio.Future[str | ToolError]"]]) -> None:
        BATCH_SIZE.labels(self._name).observe(len(batch))
        try:
            replies = list(await within(self._limit_s, self._run_batch([arguments for arguments, _ in batch])))
            if len(replies) != len(batch):
                raise ToolError(f"the tool gave {len(replies)} replies to {len(batch)} calls")
        except Exception as error:  # handed to each of the calls, which know what it means
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), reply in zip(batch, replies, strict=True):
            if not answer.done():
                answer.set_result(reply)
