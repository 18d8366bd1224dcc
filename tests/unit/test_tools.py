"""Tool calls of many episodes: merged, limited, retried, cut off; whatever a tool does is somebody's row."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from weakref import WeakSet

import pytest

from inference.environments.base import Environment, Message, Result, Score, Tool, ToolError, ToolUnavailable
from inference.environments.calls import Call
from inference.tools import Toolbox
from inference.tools.guard import BREAK_AFTER, COOL_S, Guard
from inference.tools.reply import MAX_REPLY
from schemas.names import ResultStatus

Run = Callable[[dict[str, Any]], Awaitable[Any]]


class Bench(Environment):
    """An environment with one tool."""

    def __init__(self, tool: Tool):
        self.tools = {"use": tool}

    def reset(self, seed: int) -> list[Message]:
        return []

    async def score(self, answer: str) -> Score:
        return Score(0.0)


class Service:
    """A service that several episodes share; answers `n` doubled, in batches that it counts."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.stuck = asyncio.Event()

    async def double(self, many: Sequence[dict[str, Any]]) -> Sequence[str | ToolError]:
        self.batches.append([a["n"] for a in many])
        if any(a["n"] == 13 for a in many):
            await self.stuck.wait()
        return [ToolError("no negatives") if a["n"] < 0 else str(2 * a["n"]) for a in many]

    async def one(self, arguments: dict[str, Any]) -> str:
        raise AssertionError("a batchable tool runs in batches")


def call(**arguments: Any) -> Call:
    return Call("use", arguments, str(arguments))


def reply(tool: Tool, arguments: dict[str, Any] | None = None, timeout_s: float = 30) -> Result:
    async def ask() -> Result:
        (result,) = await Toolbox().run(Bench(tool), [call(**arguments or {})], timeout_s)
        return result

    return asyncio.run(ask())


def answering(value: object) -> Tool:
    async def run(arguments: dict[str, Any]) -> Any:
        return value

    return Tool(run)


def test_calls_of_several_episodes_go_in_one_request() -> None:
    async def play() -> tuple[list[list[int]], list[list[str]]]:
        service, toolbox = Service(), Toolbox()
        tool = Tool(service.one, run_batch=service.double, batch_window_s=3600, max_batch=6)
        turns = [toolbox.run(Bench(tool), [call(n=n), call(n=n + 1)], 30) for n in (1, 10, 20)]
        results = await asyncio.gather(*turns)
        return service.batches, [[r.text for r in turn] for turn in results]

    batches, texts = asyncio.run(play())
    assert batches == [[1, 2, 10, 11, 20, 21]]
    assert texts == [["2", "4"], ["20", "22"], ["40", "42"]]


def test_a_full_batch_leaves_before_its_window_closes() -> None:
    async def play() -> list[list[int]]:
        service, toolbox = Service(), Toolbox()
        tool = Tool(service.one, run_batch=service.double, batch_window_s=3600, max_batch=2)
        await asyncio.gather(*(toolbox.run(Bench(tool), [call(n=n)], 30) for n in range(4)))
        return service.batches

    assert asyncio.run(play()) == [[0, 1], [2, 3]]


def test_one_bad_call_of_a_batch_fails_alone() -> None:
    async def play() -> list[Result]:
        service, toolbox = Service(), Toolbox()
        tool = Tool(service.one, run_batch=service.double)
        return list(await toolbox.run(Bench(tool), [call(n=1), call(n=-1), call(n=2)], 30))

    results = asyncio.run(play())
    assert [r.status for r in results] == [ResultStatus.OK, ResultStatus.ERROR, ResultStatus.OK]
    assert [r.text for r in results] == ["2", "error: no negatives", "4"]


def test_a_stuck_batch_times_out_alone_and_later_calls_do_not_wait_for_it() -> None:
    async def play() -> tuple[Result, Result]:
        service, toolbox = Service(), Toolbox()
        tool = Tool(service.one, run_batch=service.double, max_batch=1)
        stuck = asyncio.create_task(toolbox.run(Bench(tool), [call(n=13)], 0.5))
        await asyncio.sleep(0)
        (quick,) = await toolbox.run(Bench(tool), [call(n=4)], 30)
        assert not stuck.done()
        return quick, (await stuck)[0]

    quick, stuck = asyncio.run(play())
    assert (quick.status, quick.text) == (ResultStatus.OK, "8")
    assert stuck.status == ResultStatus.TIMEOUT


def test_a_batch_of_the_wrong_length_is_an_error_of_each_of_its_calls() -> None:
    async def short(many: Sequence[dict[str, Any]]) -> Sequence[str]:
        return ["only one"]

    async def play() -> list[Result]:
        tool = Tool(Service().one, run_batch=short)
        return list(await Toolbox().run(Bench(tool), [call(n=1), call(n=2)], 30))

    assert [r.text for r in asyncio.run(play())] == ["error: the tool gave 1 replies to 2 calls"] * 2


class Batching(Bench):
    """Its batches are its own."""

    def __init__(self) -> None:
        super().__init__(Tool(Service().one, run_batch=self.answer, batch_window_s=0.01))

    async def answer(self, many: Sequence[dict[str, Any]]) -> Sequence[str]:
        return [str(a["n"]) for a in many]


def test_no_environment_is_kept_once_its_calls_have_ended() -> None:
    """However they ended. One is: a tool's guard takes its limits from the first."""

    async def play() -> int:
        toolbox, kept = Toolbox(), WeakSet[Batching]()

        async def one(n: int) -> None:
            environment = Batching()
            kept.add(environment)
            await toolbox.run(environment, [call(n=n), call(n=n)], 30)

        async def stopped() -> None:
            tasks = [asyncio.create_task(one(n)) for n in range(20)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        for n in range(20):
            await one(n)
        await stopped()
        async with asyncio.timeout(30):
            while len(kept) > 1:
                gc.collect()
                await asyncio.sleep(0.01)  # until the windows have closed
        return len(kept)

    assert asyncio.run(play()) == 1


def test_an_episode_that_ended_is_in_no_batch() -> None:
    async def play() -> list[list[int]]:
        service, toolbox = Service(), Toolbox()
        tool = Tool(service.one, run_batch=service.double, batch_window_s=0.05)
        gone = asyncio.create_task(toolbox.run(Bench(tool), [call(n=1)], 30))
        stays = asyncio.create_task(toolbox.run(Bench(tool), [call(n=2)], 30))
        await asyncio.sleep(0)
        gone.cancel()
        await stays
        return service.batches

    assert asyncio.run(play()) == [[2]]


@pytest.mark.parametrize("value", [None, b"bytes", {"a": 1}, 3.5, ["x"], object(), float("nan"), Exception("x")])
def test_a_reply_that_is_not_text_is_an_error_that_the_agent_reads(value: object) -> None:
    result = reply(answering(value))
    assert result.status == ResultStatus.ERROR
    assert result.text == f"error: the tool's reply is {type(value).__name__}, not text"


def test_a_huge_reply_is_cut_and_says_so() -> None:
    result = reply(answering("x" * 10_000_000))
    assert result.status == ResultStatus.OK
    assert result.text == "x" * MAX_REPLY + " ... (cut from 10000000 characters)"


def test_what_utf8_cannot_say_is_replaced() -> None:
    assert reply(answering("a\ud800b\0c")).text == "a?b\ufffdc"


def test_an_unavailable_tool_is_tried_again_and_the_tries_are_recorded() -> None:
    tries = 0

    async def run(arguments: dict[str, Any]) -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ToolUnavailable("503")
        return "here"

    result = reply(Tool(run, retries=2))
    assert (result.status, result.text, result.attempts) == (ResultStatus.OK, "here", 3)


def test_a_tool_that_stays_unavailable_is_the_infrastructures_failure() -> None:
    async def run(arguments: dict[str, Any]) -> str:
        raise ToolUnavailable("503")

    with pytest.raises(ToolUnavailable, match="503"):
        reply(Tool(run, retries=1))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def outcomes(guard: Guard, works: Sequence[Exception | None]) -> list[str]:
    """How each call ended, one after the other: None is an answer."""

    async def one(work: Exception | None) -> str:
        async def run() -> str:
            if work is not None:
                raise work
            return "answered"

        try:
            return (await guard.run(run))[0]
        except Exception as error:  # the test tells them apart
            return str(error)

    async def all_of_them() -> list[str]:
        return [await one(work) for work in works]

    return asyncio.run(all_of_them())


def test_a_tool_that_keeps_failing_is_cut_off_and_comes_back_when_it_answers() -> None:
    clock = Clock()
    guard = Guard("search", answering(""), clock)
    assert outcomes(guard, [TimeoutError("late")] * BREAK_AFTER) == ["late"] * BREAK_AFTER
    (refused,) = outcomes(guard, [None])
    assert "search is down" in refused
    assert "late" in refused
    clock.now += COOL_S
    assert outcomes(guard, [TimeoutError("still late")]) == ["still late"]  # the one that is let through
    assert "is down" in outcomes(guard, [None])[0]
    clock.now += COOL_S
    assert outcomes(guard, [None, None]) == ["answered", "answered"]


def test_a_tool_that_answers_with_errors_of_its_own_is_not_down() -> None:
    guard = Guard("search", answering(""), Clock())
    assert outcomes(guard, [ToolError("no")] * (2 * BREAK_AFTER))[-1] == "no"


def test_failures_count_only_in_a_row() -> None:
    guard = Guard("search", answering(""), Clock())
    works = [*[TimeoutError("late")] * (BREAK_AFTER - 1), None] * 2
    assert outcomes(guard, works)[-1] == "answered"


def test_a_rate_spaces_calls_beyond_a_seconds_worth() -> None:
    # 2 a second: two at once, and the third half a second later, by the guard's own clock
    clock, waits = Clock(), []

    class Slow(Guard):
        async def _turn(self) -> None:
            before = self._free_at
            await super()._turn()
            waits.append(max(0.0, self._free_at - clock.now) if before else 0.0)

    guard = Slow("search", Tool(Service.one, rate_per_s=200.0), clock)  # pyright: ignore[reportArgumentType]
    outcomes(guard, [None] * 203)
    assert waits[199] == pytest.approx(0.0, abs=1e-9)
    assert waits[202] == pytest.approx(3 / 200)


def test_no_more_calls_at_once_than_the_tool_allows() -> None:
    running = most = 0

    async def run(arguments: dict[str, Any]) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return "x"

    async def play() -> None:
        toolbox, tool = Toolbox(), Tool(run, max_concurrent=2)
        await asyncio.gather(*(toolbox.run(Bench(tool), [call()], 30) for _ in range(10)))

    asyncio.run(play())
    assert most == 2
