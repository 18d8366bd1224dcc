"""The verbs of a rollout service beside one another, with an engine that starts when it is told to, and no broker."""

import asyncio
from collections.abc import Generator
from pathlib import Path
from threading import Event
from typing import NoReturn

import pytest

from inference.engines.base import EngineError
from inference.orders import Orders
from inference.outbox import Outbox
from inference.serve import serve
from inference.service import RolloutService
from inference.serving import Server
from inference.weights import WeightFollower
from infra.telemetry import Stop, Telemetry
from schemas.errors import BrokerError
from schemas.messages import Task
from schemas.settings import Settings
from tests.rollout_fakes import FakeEngine, FakeStore

PROBE = (-1.0, -2.0)


class NoTasks:
    """A queue without tasks."""

    error = ""

    def next(self, max_tasks: int) -> list[Task]:
        return []

    def close(self) -> None:
        """Nothing to leave."""


class Starts:
    """Makes engines: the first once `up` is set, no other."""

    def __init__(self) -> None:
        self.begun, self.up, self.num = Event(), Event(), 0

    def make(self, folder: Path, version: int) -> FakeEngine:
        self.num += 1
        if self.num > 1:
            raise EngineError("started again")
        self.begun.set()
        self.up.wait(45)
        return FakeEngine(folder, version)


@pytest.fixture
def starts() -> Generator[Starts]:
    made = Starts()
    yield made
    made.up.set()


def _no_broker() -> NoReturn:
    raise BrokerError("away")


def service_of(tmp_path: Path, store: FakeStore, starts: Starts) -> RolloutService:
    settings = Settings.model_validate({"run": {"data_dir": str(tmp_path)}, "kafka": {"brokers": "127.0.0.1:9"}})
    telemetry = Telemetry(settings, "rollout", "rollout-0")
    outbox = Outbox(tmp_path / "outbox", settings.rollout.outbox_bytes)
    service = RolloutService(settings, telemetry, NoTasks(), Orders(_no_broker), outbox)
    service.server = Server(store, starts.make, tmp_path / "cache", "fp32")
    service.weights = WeightFollower(settings, store, service.server)
    return service


@pytest.fixture
def service(tmp_path: Path, starts: Starts) -> Generator[RolloutService]:
    """One that joins a run too late to sample for it with what it serves, which is nothing."""
    made = service_of(tmp_path, FakeStore(dict.fromkeys(range(1, 6), PROBE)), starts)
    assert made.settings.loop.max_staleness < 5
    yield made
    made.telemetry.close()


@pytest.mark.timeout(60)
def test_a_start_of_the_engine_that_is_given_up_is_begun_again_by_no_verb(
    service: RolloutService, starts: Starts
) -> None:
    async def run() -> None:
        following = asyncio.create_task(service.follow_weights())
        await asyncio.to_thread(starts.begun.wait, 30)
        pulling = asyncio.create_task(service.pull_tasks())
        await asyncio.sleep(0)  # it waits for its own look now
        service.weights.give_up()
        await asyncio.gather(following, pulling)
        starts.up.set()
        await service.close()

    asyncio.run(run())
    assert (starts.num, service.weights.serving) == (1, 0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", ["follow_weights", "pull_tasks"])
def test_a_stop_waits_for_no_start_of_the_engine_whichever_verb_began_it(
    service: RolloutService, starts: Starts, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    async def idle() -> None:
        await asyncio.sleep(0.01)

    async def run() -> bool:
        if verb == "pull_tasks":
            monkeypatch.setattr(service, "follow_weights", idle)
            service.weights.latest = 5  # as an earlier look found
        stop = Stop()
        serving = asyncio.create_task(serve(service, stop))
        await asyncio.to_thread(starts.begun.wait, 30)
        stop.set()
        await serving
        came_up = starts.up.is_set()
        starts.up.set()
        return came_up

    assert (asyncio.run(run()), starts.num) == (False, 1)
