"""A limit that holds also for work that ignores it."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(limit_s: float, work: Awaitable[T]) -> T:
    """The result of `work`.

    Work that is late is cancelled and left to itself, so that even one which ignores the cancellation holds nobody up.

    Raises:
        TimeoutError: not done after `limit_s` seconds.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(_retrieve)
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    finally:
        task.cancel()  # no effect on a task that is done
    if not done:
        raise TimeoutError(f"not done after {limit_s:g} s")
    return task.result()


def _retrieve(task: "asyncio.Future[T]") -> None:
    """Take the exception of work that nobody waits for any more, so that it is not reported as lost."""
    if not task.cancelled():
        task.exception()
