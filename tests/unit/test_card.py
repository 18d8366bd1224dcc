"""A card that learner and vLLM server share: whose turn it is, and when the server sleeps."""

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from inference.engines.base import EngineError
from inference.engines.vllm import card as module
from inference.engines.vllm.card import Card
from infra.turns import Turn, device_turn
from schemas.errors import SettingsError
from schemas.settings import load

HOLD = """
import pathlib, sys, time
from infra.turns import Turn
turn = Turn(pathlib.Path(sys.argv[1]))
print(turn.take(), flush=True)
time.sleep(600)
"""
SHARED = ("--vllm.share_device=true", "--rollout.engine=vllm")
SYNC = "infra/profiles/sync.toml"


class Server:
    """Notes what it is told; fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.told = list[str]()
        self._fails = fails

    async def sleep(self, limit_s: float) -> None:
        await self._do("sleep")

    async def wake_up(self, limit_s: float) -> None:
        await self._do("wake_up")

    async def _do(self, what: str) -> None:
        self.told.append(what)
        if self._fails == what:
            raise EngineError("status 500")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.005)
    monkeypatch.setattr(module, "_IDLE_S", 0.02)


def resting(tmp_path: Path, server: Server, use: Callable[[Card, Turn], Awaitable[None]]) -> None:
    """`use` a card whose server rests, and the learner's turns on it."""

    async def run() -> None:
        card = Card(Turn(tmp_path / "turn"), 10)
        rest = asyncio.create_task(card.rest(server))
        try:
            await use(card, Turn(tmp_path / "turn"))
        finally:
            rest.cancel()
            with suppress(asyncio.CancelledError):
                await rest

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def test_a_turn_is_one_holders_until_it_lets_go_or_dies(tmp_path: Path) -> None:
    mine, path = Turn(tmp_path / "a" / "turn"), tmp_path / "a" / "turn"
    assert [mine.take(), mine.take()] == [True, True]
    assert not Turn(path).take()
    mine.release()
    mine.release()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"True\n"
        assert not mine.take()
        other.kill()
    assert mine.take()


def test_a_turn_that_a_full_disk_refuses_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    mine, path = Turn(tmp_path / "turn"), tmp_path / "turn"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="no space"):
            mine.take()
    assert Turn(path).take()


def test_the_time_between_two_turns_in_a_row_is_ones_own_and_that_of_anothers_turn_is_not(tmp_path: Path) -> None:
    now = [0.0]
    mine, other = (Turn(tmp_path / "turn", lambda: now[0]) for _ in range(2))
    for at, act in (
        (0, mine.take),
        (3, mine.release),
        (5, mine.take),  # nobody wanted it from 3 to 5
        (6, mine.release),
        (7, other.take),
        (10, other.release),
        (14, mine.take),
    ):
        now[0] = at
        act()
    now[0] = 15
    assert (mine.own_s(), other.own_s()) == (6 + 1, 3)


def test_a_server_sleeps_and_leaves_the_card_once_no_call_and_no_episode_needs_it(tmp_path: Path) -> None:
    server = Server()

    async def use(card: Card, learner: Turn) -> None:
        async with card.needed("episode"):
            await asyncio.sleep(0.1)
            assert not learner.take()
        await asyncio.sleep(0.1)  # between two turns of the episode
        assert (server.told, learner.take()) == ([], False)
        card.release("episode")
        await until(learner.take)
        assert server.told == ["sleep"]

    resting(tmp_path, server, use)


def test_a_call_waits_for_the_learner_and_wakes_the_server_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()

    async def use(card: Card, learner: Turn) -> None:
        async def call() -> None:
            async with card.needed():
                assert server.told == ["sleep", "wake_up"]

        await until(lambda: server.told == ["sleep"])
        assert learner.take()
        monkeypatch.setattr(module, "_IDLE_S", 3600)  # once awake it stays so
        calls = asyncio.gather(call(), call())
        await asyncio.sleep(0.1)
        assert server.told == ["sleep"]
        learner.release()
        await calls
        assert not learner.take()

    resting(tmp_path, server, use)


def test_a_learner_that_keeps_the_card_fails_the_call_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TURN_WAIT_S", 0.05)

    async def use(card: Card, learner: Turn) -> None:
        assert learner.take()
        with pytest.raises(EngineError, match=r"the learner has had the card for 0\.05 s"):
            async with card.needed():
                raise AssertionError

    resting(tmp_path, Server(), use)


@pytest.mark.parametrize("fails", ["sleep", "wake_up"])
def test_a_server_that_does_not_fall_asleep_or_wake_up_is_a_fault_and_keeps_the_card_till_it_is_gone(
    tmp_path: Path, fails: str
) -> None:
    server = Server(fails)

    async def use(card: Card, learner: Turn) -> None:
        async with card.needed():
            pass
        await until(lambda: server.told == ["sleep"])
        if fails == "wake_up":
            with pytest.raises(EngineError, match="status 500"):
                async with card.needed():
                    raise AssertionError
        assert "status 500" in card.fault
        assert not learner.take()
        card.gone()
        assert learner.take()
        await card.forget()
        assert card.fault == ""

    resting(tmp_path, server, use)


def test_what_becomes_of_the_server_before_is_no_fault_of_the_one_after(tmp_path: Path) -> None:
    dying, dead = asyncio.Event(), asyncio.Event()

    class Dying(Server):
        async def sleep(self, limit_s: float) -> None:
            dying.set()
            await dead.wait()
            self.told.append("gone")
            raise EngineError("it is gone")

    server = Dying()

    async def use(card: Card, learner: Turn) -> None:
        async with card.needed():
            pass
        await dying.wait()
        forgotten = asyncio.create_task(card.forget())
        await asyncio.sleep(0)
        dead.set()
        await forgotten
        await asyncio.sleep(0.05)
        assert (server.told, card.fault) == (["gone"], "")

    resting(tmp_path, server, use)


def test_turns_are_for_one_server_in_mode_sync_and_anything_else_is_refused(tmp_path: Path) -> None:
    assert device_turn(load([SYNC], [f"--run.data_dir={tmp_path}", *SHARED])) is not None
    assert device_turn(load([SYNC], ["--rollout.engine=vllm"])) is None
    with pytest.raises(SettingsError, match=r"loop\.mode = 'sync' \(got 'async'\)"):
        load([], list(SHARED))
    for wrong in ("rollout.services=2", "evaluator.engine=vllm", "rollout.engine=torch", "vllm.url=http://other"):
        with pytest.raises(SettingsError, match=wrong.partition("=")[0]):
            load([SYNC], [*SHARED, f"--{wrong}"])
