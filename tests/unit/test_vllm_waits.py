"""What a vLLM engine waits for, on a server that answers when it is told to: each wait has its own limit and reason."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from inference.engines import base
from inference.engines.base import EngineError
from inference.engines.vllm import client
from inference.engines.vllm.engine import VllmEngine
from inference.metered import MeteredEngine, TokenBudget
from inference.serving import Server
from infra import waits
from infra.stack.ports import HOST
from infra.turns import Turn
from infra.waits import WAITS
from schemas.settings import Vllm
from tests.rollout_fakes import FakeStore

LOAD_S = 0.3
"""Shorter than what is shown as 1 s."""
SCORES = {"prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": -2.0}}]}
SAMPLED = {
    "finish_reason": "length",
    "token_ids": [4],
    "logprobs": {"content": [{"token_id": 4, "logprob": -0.5}]},
    "weight_versions": [{"start": 0, "end": 1, "version": "1"}],
}


class Peer:
    """A vLLM server, as far as the engine asks it: up and answering once the events are set."""

    def __init__(self) -> None:
        self.up, self.answers = asyncio.Event(), asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/health":
            return web.Response(status=200 if self.up.is_set() else 503)
        if request.path == "/inference/v1/generate":
            await self.answers.wait()
        return web.json_response({"success": True, "choices": [SAMPLED], **SCORES})


Use = Callable[[Peer, Callable[[Path, int], VllmEngine]], Awaitable[None]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "LOAD_S", LOAD_S)
    monkeypatch.setattr(client, "_POLL_S", 0.02)
    monkeypatch.setattr(waits, "SHOWN_AFTER_S", 0.0)


def run(use: Use, turn: Turn | None = None) -> None:
    """`use` a server, and how engines on it are made."""

    async def whole() -> None:
        async with _listening(peer := Peer()) as url:
            settings, made = Vllm(url=url, start_timeout_s=60, swap_timeout_s=10), list[VllmEngine]()

            def make(folder: Path, version: int) -> VllmEngine:
                options = {"settings": settings, "log": Path("unused"), "max_tokens": 64, "threads": 1, "turn": turn}
                made.append(VllmEngine(folder, version, **options))  # pyright: ignore[reportArgumentType]
                return made[-1]

            try:
                await use(peer, make)
            finally:
                for engine in made:
                    await engine.close()

    asyncio.run(whole())


@asynccontextmanager
async def _listening(peer: Peer) -> AsyncGenerator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", peer.handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        yield f"http://{HOST}:{runner.addresses[0][1]}"
    finally:
        peer.answers.set()
        await runner.cleanup()


async def until_said(words: str) -> None:
    async with asyncio.timeout(30):
        while words not in WAITS.fault():
            await asyncio.sleep(0.005)


def served(tmp_path: Path, make: Callable[[Path, int], VllmEngine]) -> Server:
    return Server(FakeStore({1: (-1.0, -2.0)}), make, tmp_path, "fp32")


def test_a_server_may_take_longer_to_come_up_than_a_load(tmp_path: Path) -> None:
    async def use(peer: Peer, make: Callable[[Path, int], VllmEngine]) -> None:
        peer.answers.set()
        serving = asyncio.create_task(served(tmp_path, make).serve(1))
        await until_said("the vLLM server to come up: waiting for 1 of 60 s, then the version is skipped (/health: sta")
        peer.up.set()
        assert (await serving).version == 1

    run(use)


def test_a_probe_that_is_never_answered_has_a_limit_of_its_own(tmp_path: Path) -> None:
    async def use(peer: Peer, make: Callable[[Path, int], VllmEngine]) -> None:
        peer.up.set()
        serving = asyncio.create_task(served(tmp_path, make).serve(1))
        await until_said("the engine to score the probe: waiting for 0 of 0.3 s")
        with pytest.raises(EngineError, match=r"the engine did not score the probe within 0\.3 s"):
            await serving

    run(use)


def test_a_learner_may_keep_the_card_for_longer_than_a_load_takes(tmp_path: Path) -> None:
    learner = Turn(tmp_path / "turn")

    async def use(peer: Peer, make: Callable[[Path, int], VllmEngine]) -> None:
        peer.up.set()
        peer.answers.set()
        assert learner.take()
        serving = asyncio.create_task(served(tmp_path, make).serve(1))
        await until_said("the learner to leave the card: waiting for 1 of 300 s")
        learner.release()
        assert (await serving).version == 1

    run(use, Turn(tmp_path / "turn"))


def test_a_request_that_waits_for_the_card_is_not_counted_as_busy(tmp_path: Path) -> None:
    learner, meter = Turn(tmp_path / "turn"), Meter()

    async def use(peer: Peer, make: Callable[[Path, int], VllmEngine]) -> None:
        peer.up.set()
        assert learner.take()
        engine = MeteredEngine(make(tmp_path, 1), meter, TokenBudget(100))
        generated = engine.generate("episode", [1, 2], max_new_tokens=1, temperature=1.0, stop_ids=(), seed=0)
        request = asyncio.create_task(generated)
        await until_said("the learner to leave the card")
        assert meter.seen == []
        learner.release()
        async with asyncio.timeout(30):
            while not meter.seen:
                await asyncio.sleep(0.005)
        assert meter.seen == ["begun"]
        peer.answers.set()
        assert (await request).token_ids == (4,)
        assert meter.seen == ["begun", "ended"]

    run(use, Turn(tmp_path / "turn"))


class Meter:
    """Notes when work begins and ends."""

    def __init__(self) -> None:
        self.seen = list[str]()

    @contextmanager
    def busy(self) -> Generator[None]:
        self.seen.append("begun")
        yield
        self.seen.append("ended")
