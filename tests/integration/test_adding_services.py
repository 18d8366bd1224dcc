"""Rollout services that come and go while others run: nothing is restarted, and nothing is lost."""

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from inference.outbox import Outbox
from infra.kafka import Follower
from schemas.messages import Task, UsageInterval
from schemas.settings import Kafka
from schemas.topics import USAGE
from tests.benchmarks.longtail import ENVIRONMENT
from tests.rollout_fakes import task
from tests.rollout_process import (
    GROUP_SIZE,
    Service,
    assert_each_once,
    prepare_rollouts,
    received,
    send,
    until,
)

FIRST, SECOND = "rollout-0", "rollout-1"
PLACES, WAITING = 20, 15
"""Episodes at once in a service, and groups that are kept waiting: more than two services play at once."""


def tasks_of(draws: Iterable[int]) -> list[Task]:
    """Episodes that wait for a tool most of the time, so that the services leave the cores to one another."""
    options = {"environment": ENVIRONMENT, "options": {"tool_s": 1.0}, "group_size": GROUP_SIZE}
    return [task(draw, index=draw, **options) for draw in draws]  # type: ignore[arg-type]


class Load:
    """Tasks in the topic, always more than are played; and what each service says that it has produced."""

    def __init__(self, kafka: Kafka) -> None:
        self._kafka, self._draws = kafka, itertools.count()
        self._usage = Follower(kafka, USAGE.name, UsageInterval, "load")
        self.sent, self.produced = 0, defaultdict[str, int](int)

    def keep(self) -> None:
        """Read the totals, and send what is missing of WAITING groups."""
        for told in self._usage.poll():
            self.produced[told.instance] = told.produced_trajectories or 0
        missing = WAITING + sum(self.produced.values()) // GROUP_SIZE - self.sent
        if missing >= 5:
            send(self._kafka, tasks_of(itertools.islice(self._draws, missing)))
            self.sent += missing

    def incomplete(self) -> set[str]:
        """Groups of the tasks sent of which a member is in the topic not even once."""
        members = {(r.group_id, r.group_index) for m in received(self._kafka) for r in m.rows}
        seen = Counter(group for group, _ in members)
        return {t.group_id for t in tasks_of(range(self.sent)) if seen[t.group_id] < GROUP_SIZE}

    def until_produced(self, instance: str, number: int) -> None:
        """Keep the load up until `instance` has produced `number` trajectories more."""
        wanted = self.produced[instance] + number

        def enough() -> bool:
            self.keep()
            return self.produced[instance] >= wanted

        until(enough)


@pytest.mark.kafka
@pytest.mark.slow
def test_a_service_added_while_running_takes_load_within_10_s_and_one_that_is_removed_loses_nothing(
    tmp_path: Path, kafka: Kafka, start: Callable[..., Service], record_property: Callable[[str, object], None]
) -> None:
    settings = prepare_rollouts(tmp_path, kafka, drain_s=60)  # what runs ends, however slow this machine is
    settings = settings.model_copy(
        update={"rollout": settings.rollout.model_copy(update={"max_episodes": PLACES, "max_turn_tokens": 200})}
    )
    load, first = Load(kafka), start(settings, instance=FIRST)
    load.until_produced(FIRST, 20)

    begun, second = time.monotonic(), start(settings, instance=SECOND)
    load.until_produced(SECOND, 1)
    took = {"seconds": time.monotonic() - begun, "processor_seconds": second.processor_s}
    record_property("until_load", took)
    print("from the start of its process to its first reported episodes:", took)
    assert took["processor_seconds"] < 10  # seconds by the clock are as many, where nothing else wants the cores
    load.until_produced(SECOND, 40)
    load.until_produced(FIRST, 1)  # it was neither restarted nor starved
    assert not first.has_ended

    assert first.stop() == 0
    load.until_produced(SECOND, 40)
    left = load.incomplete()
    send(kafka, [t for t in tasks_of(range(load.sent)) if t.group_id in left])  # as leases do that end
    until(lambda: not load.incomplete())
    assert second.stop() == 0

    messages = received(kafka)
    outboxes = [Outbox(settings.run.folder / "outbox" / name, 2**28) for name in (FIRST, SECOND)]
    for outbox in outboxes:
        assert_each_once([m for m in messages if m.outbox == outbox.id], outbox)
    assert {m.outbox for m in messages} == {outbox.id for outbox in outboxes}
    assert [r.error for m in messages for r in m.rows if r.stop_reason == "shutdown"] == []
