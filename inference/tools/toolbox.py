"""Running the tool calls of a turn: concurrently, each within its limit, batchable ones merged across episodes."""

import asyncio
import time
from collections.abc import Hashable, Sequence
from weakref import WeakValueDictionary

from prometheus_client import Histogram

from inference.environments.base import Environment, Result, Tool, ToolError
from inference.environments.calls import Call, Malformed, explain
from inference.tools.guard import Guard
from inference.tools.merge import Merger
from inference.tools.reply import readable
from inference.tools.within import within
from schemas.names import ResultStatus

CALLS = Histogram("lagoon_tool_call_seconds", "Tool calls, with the wait for their turn", ["tool", "status"])


class Toolbox:
    """What the episodes of a process share: the guards of their tools, and the batches that their calls join."""

    def __init__(self) -> None:
        self._guards: dict[str, Guard] = {}
        self._mergers: WeakValueDictionary[Hashable, Merger] = WeakValueDictionary()
        """A merger lives while a call waits or a batch runs: it holds its tool, which may hold an environment."""

    async def run(
        self, environment: Environment, calls: Sequence[Call | Malformed], timeout_s: float
    ) -> tuple[Result, ...]:
        """Results of `calls`, in order. No tool runs for a malformed call.

        Raises:
            Exception: whatever a tool raised that is not a ToolError; the environment is broken.
        """
        outcomes = await asyncio.gather(
            *(self._call(environment, call, timeout_s) for call in calls), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return tuple(outcome for outcome in outcomes if isinstance(outcome, Result))

    async def _call(self, environment: Environment, call: Call | Malformed, timeout_s: float) -> Result:
        if isinstance(call, Malformed):
            return Result(call, ResultStatus.MALFORMED, explain(call))
        tool = environment.tools.get(call.tool)
        if tool is None:
            known = ", ".join(sorted(environment.tools))
            return Result(call, ResultStatus.ERROR, f"error: no tool {call.tool[:80]!r}; there is {known}")
        begun_s, attempts = time.perf_counter(), 1
        name, limit_s = tool.service or f"{type(environment).__name__}.{call.tool}", tool.timeout_s or timeout_s
        try:
            reply, attempts = await self._guard(name, tool).run(lambda: self._reply(name, tool, call, limit_s))
            status, text = ResultStatus.OK, readable(reply)
        except ToolError as error:
            status, text = ResultStatus.ERROR, readable(f"error: {error}")
        except TimeoutError:
            status, text = ResultStatus.TIMEOUT, f"error: the tool did not answer within {limit_s:g} s"
        latency_s = time.perf_counter() - begun_s
        CALLS.labels(name, status).observe(latency_s)
        return Result(call, status, text, latency_s, attempts)

    async def _reply(self, name: str, tool: Tool, call: Call, limit_s: float) -> object:
        if tool.run_batch is None:
            return await within(limit_s, tool.run(call.arguments))
        key = (name, tool.run_batch)  # methods of one object are equal, so a shared client's batches are shared
        merger = self._mergers.get(key)
        if merger is None:
            merger = self._mergers[key] = Merger(name, tool, tool.run_batch, limit_s)
        return await merger.run(call.arguments)

    def _guard(self, name: str, tool: Tool) -> Guard:
        if name not in self._guards:
            self._guards[name] = Guard(name, tool)
        return self._guards[name]
