"""The dispatcher as a process, on a real broker and a real lake, killed -9 at work."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from infra.kafka import Producer, consumer, ensure_topics
from infra.lake import Lake
from infra.stack.programs import ROOT
from schemas.messages import BufferReport, ClosedGroup, Task, WeightSummary, decode
from schemas.settings import Kafka, Settings
from schemas.topics import BUFFER, TASKS, WEIGHTS
from tests.samples import NOON

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

LIMIT_S = 120


@contextmanager
def dispatching(saved: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m flows.dispatch` as a process of its own, dead at the end."""
    command = [sys.executable, "-m", "flows.dispatch", "--config", str(saved)]
    process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


class Tasks:
    """Every task that was sent, read from the beginning of the topic."""

    def __init__(self, kafka: Kafka) -> None:
        self.consumer = consumer(kafka, "test-tasks", **{"auto.offset.reset": "earliest"})
        self.consumer.subscribe([kafka.topic(TASKS.name)])
        self.tasks: list[Task] = []

    def read(self) -> list[Task]:
        for message in self.consumer.consume(100, 0.2):
            assert message.error() is None
            self.tasks.append(decode(Task, message.value()))
        return self.tasks


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {LIMIT_S} s"


def closing(tasks: list[Task]) -> bytes:
    return BufferReport(
        shard="s000",
        at=datetime.now(UTC),
        learner_version=1,
        trajectories={},
        tokens={},
        live={},
        num_pending=0,
        closed=tuple(ClosedGroup(group_id=t.group_id, task_id=t.task_id, num_members=4, complete=True) for t in tasks),
    ).to_bytes()


def dispatches(lake: Lake) -> list[dict[str, Any]]:
    table = lake.table("dispatches")
    table.update_incremental()
    return table.to_pyarrow_dataset().to_table().to_pylist()


def prepare(kafka: Kafka, tmp_path: Path, **dispatch: float) -> tuple[Path, Lake, Tasks, Producer]:
    """Settings file, lake, tasks and producer of a run whose first weight version is published."""
    settings = Settings.model_validate(
        {
            "run": {"name": "test", "data_dir": str(tmp_path)},
            "kafka": kafka.model_dump(),
            "loop": {"group_size": 4, "batch_size": 8},
            "learner": {"sync_interval_start": 1},
            "dispatch": {"updates_ahead": 2, "tick_s": 0.1, **dispatch},
            "curate": {"epoch_s": 0.2, "group_timeout_s": 0.5},
            "families": [{"name": "add"}],
        }
    )
    saved, lake = tmp_path / "settings.json", Lake.of(settings)
    settings.save(saved)
    ensure_topics(kafka, 30)
    tasks = Tasks(kafka)
    lake.ensure()
    producer = Producer(kafka, "test")
    summary = WeightSummary(version=1, fingerprint="f", num_bytes=1, train_step=1, created_at=NOON)
    producer.send(WEIGHTS.name, "1", summary.to_bytes())
    producer.flush(20)
    return saved, lake, tasks, producer


def test_a_kill_leaves_no_task_without_its_row_and_repeats_no_draw(kafka: Kafka, tmp_path: Path) -> None:
    saved, lake, tasks, producer = prepare(kafka, tmp_path, lease_s=600)
    for round_ in range(1, 4):
        with dispatching(saved) as process:
            wait(lambda n=round_: len({t.group_id for t in tasks.read()}) >= 4 * n, "tasks")
            producer.send(BUFFER.name, "s000", closing(tasks.tasks))
            producer.flush(20)
            process.kill()
    with dispatching(saved) as process:
        wait(lambda: len({t.group_id for t in tasks.read()}) >= 16, "tasks")
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    sent, rows = {t.group_id for t in tasks.read()}, dispatches(lake)
    assert {row["event"] for row in rows} == {"opened"}
    opened = [row["group_id"] for row in rows]
    assert len(opened) == len(set(opened))
    assert sent <= set(opened)
    assert sorted({t.draw for t in tasks.tasks}) == list(range(len(sent)))


def test_a_task_that_nobody_rolls_out_is_issued_again_and_then_abandoned_with_its_reason(
    kafka: Kafka, tmp_path: Path
) -> None:
    saved, lake, tasks, _ = prepare(kafka, tmp_path, lease_s=1, max_attempts=2)
    with dispatching(saved):
        wait(lambda: any(row["event"] == "abandoned" for row in dispatches(lake)), "abandoned task")
        lost = next(row for row in dispatches(lake) if row["event"] == "abandoned")
        wait(lambda: sum(t.group_id == lost["group_id"] for t in tasks.read()) >= 2, "task of both attempts")
    story = [row for row in dispatches(lake) if row["group_id"] == lost["group_id"]]
    assert [(row["event"], row["attempt"]) for row in sorted(story, key=lambda row: row["at"])] == [
        ("opened", 1),
        ("reissued", 2),
        ("abandoned", 2),
    ]
    assert lost["reason"]
    assert [t.attempt for t in tasks.tasks if t.group_id == lost["group_id"]] == [1, 2]
