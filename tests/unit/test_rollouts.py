"""Episodes in flight: bounded, independent, and each leaves exactly one row."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from inference import agent
from inference.agent import Live
from inference.engines.base import EngineError, Generation
from inference.environments.base import Call, Environment, Message, Score, Tool
from inference.rollouts import Rollouts
from inference.tokenizer import ChatTokenizer, make_tokenizer
from inference.tools import Toolbox
from schemas.messages import Task
from schemas.names import ErrorKind, Status, StopReason
from schemas.trajectory import Trajectory
from tests.rollout_fakes import FakeEngine, episode, task

HERE = "tests.unit.test_rollouts:build"
LIMITS = agent.Limits(
    max_turns=2, max_turn_tokens=8, max_tokens=200, temperature=1.0, tool_timeout_s=0.05, episode_timeout_s=20
)


class Scripted(Environment):
    """One call of tool `wait`, then the answer. In family `hang` the tool never returns; in `raise` it breaks."""

    def __init__(self, family: str) -> None:
        self._family, self._calls = family, 0
        self.tools = {"wait": Tool(self._wait)}

    def reset(self, seed: int) -> list[Message]:
        return [{"role": "user", "content": self._family}]

    def parse(self, action: str) -> Sequence[Call]:
        self._calls += 1
        return [Call("wait", {}, action)] if self._calls == 1 else []

    async def score(self, answer: str) -> Score:
        return Score(1.0)

    async def _wait(self, arguments: dict[str, Any]) -> str:
        if self._family == "hang":
            await asyncio.Event().wait()
        if self._family == "raise":
            raise OSError("the sandbox is gone")
        return "ok"


def build(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Scripted:
    return Scripted(family)


class Rows:
    """Collects what finishes."""

    def __init__(self) -> None:
        self.all: list[Trajectory] = []

    def by_family(self, family: str) -> list[Trajectory]:
        return [t for t in self.all if t.task_family == family]

    async def until(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.all) < count:
                await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(make_tokenizer(["good hang raise"]).to_str())


def _play(tokenizer: ChatTokenizer, engine: FakeEngine) -> Any:
    toolbox = Toolbox()

    async def play(of: Task, index: int, live: Live) -> Trajectory:
        return await agent.play(
            of, index, engine=engine, tokenizer=tokenizer, toolbox=toolbox, limits=LIMITS, producer="test", live=live
        )

    return play


def test_hanging_tools_and_a_raising_one_free_their_places_and_leave_one_row_each(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    """32 places; the tool hangs in 11 episodes and breaks in one (NeMo-RL's sibling radixark/miles#1012)."""
    rows = Rows()
    families = ["hang"] * 11 + ["raise"] + ["good"] * 52
    members = [task(i, family=family, index=i, group_size=1, environment=HERE) for i, family in enumerate(families)]

    async def run() -> int:
        rollouts = Rollouts(_play(tokenizer, FakeEngine(tmp_path, 1)), rows.all.append, 32, "test")
        for member in members:
            rollouts.start(member)
        await rows.until(64)
        await asyncio.sleep(0)
        return rollouts.num_running

    assert asyncio.run(run()) == 0
    assert Counter(t.task_id for t in rows.all) == Counter(m.task_id for m in members)
    assert all(t.num_prompt_tokens > 0 for t in rows.all)
    assert {(t.status, t.reward, t.turns[0].result_status) for t in rows.by_family("hang")} == {
        (Status.COMPLETED, 1.0, "timeout")
    }
    [broken] = rows.by_family("raise")
    assert (broken.status, broken.error_kind, broken.reward) == (Status.FAILED, ErrorKind.ENVIRONMENT, None)
    assert "the sandbox is gone" in str(broken.error)
    assert {(t.status, t.error_kind) for t in rows.by_family("good")} == {(Status.COMPLETED, None)}


def test_a_long_episode_holds_no_other_up() -> None:
    rows, release = Rows(), asyncio.Event()

    async def play(of: Task, index: int, live: Live) -> Trajectory:
        if of.family == "long":
            await release.wait()
        return episode(of, index)

    async def run() -> list[str]:
        rollouts = Rollouts(play, rows.all.append, 2, "test")
        rollouts.start(task(family="long", group_size=1))
        rollouts.start(task(family="short", group_size=30))
        await rows.until(30)
        before = [t.task_family for t in rows.all]
        release.set()
        await rows.until(31)
        return before

    assert asyncio.run(run()) == ["short"] * 30


def test_no_more_episodes_than_places_run_at_once_and_room_counts_those_that_wait() -> None:
    rows, running, most = Rows(), 0, 0

    async def play(of: Task, index: int, live: Live) -> Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return episode(of, index)

    async def run(ahead: int) -> list[int]:
        rows.all.clear()
        rollouts = Rollouts(play, rows.all.append, 10, "test", ahead)
        rooms = [rollouts.room]
        rollouts.start(task(group_size=4))
        rooms.append(rollouts.room)
        rollouts.start(task(1, group_size=16))
        rooms.append(rollouts.room)
        await rows.until(20)
        await asyncio.sleep(0)
        return [*rooms, rollouts.room]

    assert asyncio.run(run(0)) == [10, 6, 0, 10]
    assert asyncio.run(run(4)) == [14, 10, 0, 14]  # a group may wait for the places that become free next
    assert most == 10


def test_who_waits_for_an_end_hears_of_the_next_one_and_waits_no_longer_than_the_limit() -> None:
    rows, going = Rows(), asyncio.Event()

    async def play(of: Task, index: int, live: Live) -> Trajectory:
        if index:
            await going.wait()
        return episode(of, index)

    async def run() -> list[int]:
        rollouts = Rollouts(play, rows.all.append, 2, "test")
        rollouts.start(task(group_size=2))
        async with asyncio.timeout(20):
            await rollouts.wait_for_end(3600)
            numbers = [rollouts.num_running]
            await rollouts.wait_for_end(0.01)  # the end before is no news
            numbers.append(rollouts.num_running)
            going.set()
            await rollouts.wait_for_end(3600)
        return [*numbers, rollouts.num_running]

    assert asyncio.run(run()) == [1, 1, 0]


def test_an_exception_out_of_an_episode_becomes_its_row() -> None:
    rows = Rows()

    async def play(of: Task, index: int, live: Live) -> Trajectory:
        raise KeyError("whatever")

    async def run() -> None:
        Rollouts(play, rows.all.append, 8, "me").start(task(group_size=2))
        await rows.until(2)

    asyncio.run(run())
    assert [(t.group_index, t.status, t.error_kind, t.producer) for t in rows.all] == [
        (0, Status.FAILED, ErrorKind.ENVIRONMENT, "me"),
        (1, Status.FAILED, ErrorKind.ENVIRONMENT, "me"),
    ]
    assert "KeyError" in str(rows.all[0].error)


def test_a_dead_engine_gives_failed_rows_without_reward_and_is_counted(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    class Dead(FakeEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            raise EngineError("HTTP 500")

    rows = Rows()

    async def run() -> int:
        rollouts = Rollouts(_play(tokenizer, Dead(tmp_path, 1)), rows.all.append, 8, "test")
        rollouts.start(task(family="good", group_size=5, environment=HERE))
        await rows.until(5)
        return rollouts.failed_in_a_row

    assert asyncio.run(run()) == 5
    assert {(t.status, t.error_kind, t.reward) for t in rows.all} == {(Status.FAILED, ErrorKind.ENGINE, None)}


def test_draining_finishes_what_can_finish_and_fails_the_rest_as_shutdown(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    class Slow(FakeEngine):
        async def generate(self, session: str, token_ids: Sequence[int], **kwargs: Any) -> Generation:
            if len(rows.all) >= 2:
                await asyncio.Event().wait()
            return await super().generate(session, token_ids, **kwargs)

    rows = Rows()

    async def run() -> int:
        rollouts = Rollouts(_play(tokenizer, Slow(tmp_path, 1)), rows.all.append, 2, "test")
        rollouts.start(task(family="good", group_size=6, environment=HERE))
        await rows.until(2)
        for _ in range(20):  # let the next two begin
            await asyncio.sleep(0)
        return await rollouts.drain(limit_s=0.1)

    assert asyncio.run(run()) == 2  # two of six had not begun: no episode, no row
    assert [t.status for t in rows.all] == [Status.COMPLETED] * 2 + [Status.FAILED] * 2
    stopped = rows.all[-1]
    assert (stopped.error_kind, stopped.stop_reason, stopped.reward) == (
        ErrorKind.SHUTDOWN,
        StopReason.SHUTDOWN,
        None,
    )
    assert stopped.num_prompt_tokens > 0


def test_an_episode_that_cannot_be_kept_stops_the_service() -> None:
    def full_disk(trajectory: Trajectory) -> None:
        raise OSError("no space left")

    async def play(of: Task, index: int, live: Live) -> Trajectory:
        return episode(of, index)

    async def run() -> None:
        rollouts = Rollouts(play, full_disk, 2, "test")
        rollouts.start(task(group_size=1))
        await asyncio.sleep(0)  # let it begin
        await rollouts.drain(limit_s=1)

    with pytest.raises(OSError, match="no space left"):
        asyncio.run(run())


def test_episodes_that_nobody_could_train_on_any_more_are_stopped_with_their_row(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    """Three have tokens of version 1, where the learner is at 5 and takes 2 at the oldest; one of version 2 stays."""

    class Waiting(FakeEngine):
        async def generate(self, session: str, token_ids: Sequence[int], **options: Any) -> Generation:
            begun.release()
            await release.wait()
            return await super().generate(session, token_ids, **options)

    async def run() -> tuple[int, int]:
        engine = Waiting(tmp_path, 1)
        rollouts = Rollouts(_play(tokenizer, engine), rows.all.append, 8, "test")
        rollouts.start(task(0, group_size=3, environment=HERE))
        for _ in range(3):
            await begun.acquire()
        engine.weight_version = 2
        rollouts.start(task(1, group_size=1, environment=HERE))
        await begun.acquire()
        counts = rollouts.stop_older(5 - 3), rollouts.stop_older(5 - 3)
        await rows.until(3)
        release.set()
        await rows.until(4)
        return counts

    rows, release, begun = Rows(), asyncio.Event(), asyncio.Semaphore(0)
    assert asyncio.run(run()) == (3, 0)
    stopped = [(t.status, t.stop_reason, t.error_kind, t.reward) for t in rows.all[:3]]
    assert stopped == [(Status.FAILED, StopReason.STALE, ErrorKind.STALE_IN_FLIGHT, None)] * 3
    assert all(t.num_prompt_tokens > 0 for t in rows.all)  # the prompt is kept
    assert rows.all[3].status == Status.COMPLETED
