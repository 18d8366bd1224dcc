"""Running the tool calls of one turn: concurrently, each within its limit, batchable ones together."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from inference.environments.base import Environment, Result, Tool, ToolError
from inference.environments.calls import Call, Malformed, explain
from schemas.names import ResultStatus

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


async def run_calls(
    environment: Environment, calls: Sequence[Call | Malformed], timeout_s: float
) -> tuple[Result, ...]:
    """Results of `calls`, in order. No tool runs for a malformed call.

    Raises:
        Exception: whatever a tool raised that is not a ToolError; the environment is broken.
    """
    if not calls:
        return ()
    together = _batches(environment, calls)
    alone = [i for i in range(len(calls)) if not any(i in batch for batch in together.values())]
    batches = [
        _run_batch(environment.tools[name], [c for c in (calls[i] for i in batch) if isinstance(c, Call)], timeout_s)
        for name, batch in together.items()
    ]
    singles = [_run(environment, calls[i], timeout_s) for i in alone]
    outcomes = await asyncio.gather(*batches, *singles, return_exceptions=True)
    results: dict[int, Result] = {}
    for indices, outcome in zip([*together.values(), *([i] for i in alone)], outcomes, strict=True):
        if isinstance(outcome, BaseException):
            raise outcome
        results.update(zip(indices, outcome, strict=True))
    return tuple(results[i] for i in range(len(calls)))


def _batches(environment: Environment, calls: Sequence[Call | Malformed]) -> dict[str, list[int]]:
    """Indices of the calls that go together, by tool."""
    found: dict[str, list[int]] = {}
    for index, call in enumerate(calls):
        tool = environment.tools.get(call.tool) if isinstance(call, Call) else None
        if isinstance(call, Call) and tool is not None and tool.run_batch is not None:
            found.setdefault(call.tool, []).append(index)
    return {name: indices for name, indices in found.items() if len(indices) > 1}


async def _run(environment: Environment, call: Call | Malformed, timeout_s: float) -> list[Result]:
    if isinstance(call, Malformed):
        return [Result(call, ResultStatus.MALFORMED, explain(call))]
    tool = environment.tools.get(call.tool)
    if tool is None:
        known = ", ".join(sorted(environment.tools))
        return [Result(call, ResultStatus.ERROR, f"error: no tool {call.tool[:80]!r}; there is {known}")]
    status, texts = await _guarded(tool, timeout_s, _one(tool, call))
    return [Result(call, status, texts[0])]


async def _run_batch(tool: Tool, calls: Sequence[Call], timeout_s: float) -> list[Result]:
    assert tool.run_batch is not None, "only tools with run_batch are batched"  # noqa: S101
    status, texts = await _guarded(tool, timeout_s, tool.run_batch([c.arguments for c in calls]))
    if status != ResultStatus.OK:
        texts = [texts[0]] * len(calls)
    return [Result(call, status, text) for call, text in zip(calls, texts, strict=True)]


async def _guarded(tool: Tool, timeout_s: float, work: Awaitable[Sequence[str]]) -> tuple[ResultStatus, Sequence[str]]:
    limit_s = tool.timeout_s or timeout_s
    try:
        return ResultStatus.OK, await within(limit_s, work)
    except ToolError as error:
        return ResultStatus.ERROR, [f"error: {error}"]
    except TimeoutError:
        return ResultStatus.TIMEOUT, [f"error: the tool did not answer within {limit_s:g} s"]


async def _one(tool: Tool, call: Call) -> Sequence[str]:
    return [await tool.run(call.arguments)]


def _retrieve(task: "asyncio.Future[T]") -> None:
    """Take the exception of work that nobody waits for any more, so that it is not reported as lost."""
    if not task.cancelled():
        task.exception()
