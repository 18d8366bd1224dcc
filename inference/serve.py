"""The rollout service: `python -m inference.serve`."""

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable

import pyarrow as pa

from inference.environments.base import try_families
from inference.orders import Orders
from inference.outbox import Outbox
from inference.service import RolloutService
from inference.tasks import ShareGroupTasks
from inference.weights import WeightFollower
from infra.telemetry import INSTANCE_ENVIRONMENT, Stop, Telemetry, logger, main
from schemas.errors import LagoonError
from schemas.names import Service
from schemas.settings import Settings

_STOP_POLL_S = 0.2


async def serve(service: RolloutService, stop: Stop) -> None:
    """Roll out until `stop` is set; then finish what runs and send what is finished."""
    try:
        async with asyncio.TaskGroup() as verbs:
            looks = [verbs.create_task(_repeat(verb, stop)) for verb in (service.follow_weights, service.pull_tasks)]
            verbs.create_task(_cut_short(service.weights, looks, stop))
            verbs.create_task(_repeat(service.send_episodes, stop))
            verbs.create_task(_repeat(service.hear_orders, stop))
            verbs.create_task(_repeat(service.report, stop))
        await service.drain()
    finally:
        await service.close()


async def _repeat(verb: Callable[[], Awaitable[None]], stop: Stop) -> None:
    while not stop:
        await verb()


async def _cut_short(weights: WeightFollower, looks: list[asyncio.Task[None]], stop: Stop) -> None:
    """Once `stop` is set, end a start of the engine, which may take minutes, whichever of `looks` waits for it."""
    while not all(look.done() for look in looks):
        if stop and not weights.can_sample:
            weights.give_up()
        await asyncio.wait(looks, timeout=_STOP_POLL_S)


def open_outbox(settings: Settings, instance: str) -> Outbox:
    """The outbox of this service.

    A named instance (`$LAGOON_INSTANCE`) keeps its own. Without a name, the first that no process holds is taken, so
    that what a killed predecessor left behind is sent.

    Raises:
        LagoonError: another process holds the outbox of this name.
    """
    root, max_bytes = settings.run.folder / "outbox", settings.rollout.outbox_bytes
    if os.environ.get(INSTANCE_ENVIRONMENT):
        return Outbox(root / instance, max_bytes)
    for number in itertools.count():
        try:
            return Outbox(root / f"unnamed-{number}", max_bytes)
        except LagoonError:
            continue
    raise AssertionError


def run(settings: Settings, telemetry: Telemetry, stop: Stop) -> None:
    """Put the service together and run it."""
    log = logger(Service.ROLLOUT, telemetry.instance)
    try_families(settings.families, settings.run.seed)
    pa.array([])  # pyarrow imports pandas for its first array: now, and not while the first episodes wait
    tasks = ShareGroupTasks(settings.kafka, telemetry.instance, log.warning)
    orders = Orders.of(settings.kafka, telemetry.instance)
    outbox = open_outbox(settings, telemetry.instance)
    service = RolloutService(settings, telemetry, tasks, orders, outbox)
    asyncio.run(serve(service, stop))


if __name__ == "__main__":
    main(Service.ROLLOUT, run)
