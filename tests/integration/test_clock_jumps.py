"""Clocks set by hours under running processes and their broker: nothing lost, twice, or timed out falsely."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from infra.kafka import Producer, ensure_topics
from infra.lake import Lake
from infra.stack.programs import ROOT
from schemas.messages import LearnerReport
from schemas.settings import Kafka, Settings
from schemas.topics import BUFFER
from tests.conftest import running_broker
from tests.integration.test_curate_kafka import Rollout
from tests.integration.test_dispatch_kafka import Tasks, closing
from tests.samples import group
from tests.shifted_clock import ShiftedClock, shifted_clock

HOURS = 7200
LIMIT_S = 180
REWARDS = [0.0, 1.0, 1.0, 0.0]


class Kept:
    """A process that is started again whenever it ends with 1, as a supervisor does."""

    def __init__(self, module: str, saved: Path, clock: ShiftedClock) -> None:
        self._module, self._saved, self._clock = module, saved, clock
        self.num_ends = 0
        self.start()

    def start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LAGOON_INSTANCE": self._module} | self._clock.environment
        with open(self._saved.with_name("flows.log"), "ab") as log:
            command = [sys.executable, "-m", self._module, "--config", str(self._saved)]
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log)

    def tend(self) -> None:
        code = self.process.poll()
        if code is not None:
            assert code == 1, self._saved.with_name("flows.log").read_text()[-3000:]
            self.num_ends += 1
            self.start()

    def reason(self) -> str:
        """What its health says."""
        for file in self._saved.parent.rglob(f"services/*{self._module}.json"):
            try:
                port = json.loads(file.read_text())["port"]
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
                    return str(json.load(answer)["reason"])
            except urllib.error.HTTPError as error:
                return str(json.load(error)["reason"])
            except (OSError, ValueError):
                continue
        return ""


class Stand:
    """Curation and dispatch under one clock, their broker under another, and a test that plays everybody else."""

    def __init__(self, kafka: Kafka, folder: Path, clock: ShiftedClock) -> None:
        self.settings = Settings.model_validate(
            {
                "run": {"name": "test", "data_dir": str(folder)},
                "kafka": kafka.model_dump(),
                "loop": {"group_size": 4, "batch_size": 8},
                "learner": {"sync_interval_start": 1},
                "dispatch": {"updates_ahead": 2, "tick_s": 0.1, "lease_s": 600},
                "curate": {"epoch_s": 0.2, "group_timeout_s": 3},
                "families": [{"name": "add"}],
            }
        )
        saved = folder / "settings.json"
        self.settings.save(saved)
        ensure_topics(kafka, 30)
        self.lake = Lake.of(self.settings)
        self.lake.ensure()
        self.tasks, self.producer, self.rollout = Tasks(kafka), Producer(kafka, "test"), Rollout(kafka)
        self.rollout.publish(1)
        self.fed = 0
        self.curate, self.dispatch = Kept("flows.curate", saved, clock), Kept("flows.dispatch", saved, clock)

    def round(self, when: str) -> None:
        """Two groups reach the lake, and closed groups are followed by others."""
        for _ in range(2):
            self.rollout.send(group(self.fed, REWARDS))
            self.fed += 1
        for what in ("tasks", "tasks after those"):
            num_seen = len(self.task_groups())
            self.producer.send(BUFFER.name, "s000", closing(self.tasks.tasks))
            self.until(lambda n=num_seen: len(self.task_groups()) > n, f"{what}, {when}")
        self.until(lambda: self.rows().total() == 4 * self.fed, f"rows, {when}")

    def learn(self) -> None:
        """Say, as a learner does, that all rows so far are used: without it the dispatcher opens no more groups."""
        report = LearnerReport(
            at=datetime.now(UTC),
            weight_version=1,
            train_step=1,
            num_available=0,
            num_consumed=0,
            needs_per_step=8,
        )
        self.producer.send(BUFFER.name, "learner", report.to_bytes())
        self.producer.flush(20)

    def task_groups(self) -> set[str]:
        return {t.group_id for t in self.tasks.read()}

    def rows(self) -> Counter[str]:
        """Rows of `experience` by trajectory."""
        return Counter(row["trajectory_id"] for row in self.table("experience"))

    def closings(self) -> Counter[tuple[str, int]]:
        """Groups by how they closed and with how many members."""
        return Counter((row["closed_by"], row["num_members"]) for row in self.table("groups"))

    def table(self, name: str) -> list[dict[str, Any]]:
        """All rows of a table."""
        table = self.lake.table(name)
        table.update_incremental()
        return table.to_pyarrow_table().to_pylist()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            self.curate.tend()
            self.dispatch.tend()
            self.learn()
            assert time.monotonic() < deadline, f"no {what} within {LIMIT_S} s"
            time.sleep(0.05)


@pytest.fixture
def clocks(tmp_path: Path) -> tuple[ShiftedClock, ShiftedClock]:
    """Of the flows, and of the broker."""
    folders = [tmp_path / "flows-clock", tmp_path / "broker-clock"]
    for folder in folders:
        folder.mkdir()
    return shifted_clock(folders[0]), shifted_clock(folders[1])


@pytest.mark.timeout(120)
def test_a_clock_set_forward_while_a_source_is_asked_does_not_put_it_to_sleep(tmp_path: Path) -> None:
    clock = shifted_clock(tmp_path)
    command = [sys.executable, "-m", "tests.integration.forward_flow"]
    subprocess.run(command, cwd=ROOT, env=os.environ | clock.environment, check=True, timeout=60)


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clocks_set_by_hours_lose_nothing_double_nothing_and_time_nothing_out(
    clocks: tuple[ShiftedClock, ShiftedClock], tmp_path: Path
) -> None:
    own, brokers = clocks
    with running_broker(tmp_path, brokers.environment) as address:
        stand = Stand(Kafka(brokers=address, partitions=2), tmp_path, own)
        try:
            stand.round("at first")
            for seconds in (HOURS, -HOURS, 0):
                own.set(seconds)
                stand.round(f"with the clock of the flows off by {seconds} s")
            brokers.set(-HOURS)
            stand.round("with the broker's clock behind")
            stand.until(lambda: "broker's clock was set back" in stand.curate.reason(), "reason in health")
            stand.rollout.send(group("short", REWARDS)[:3])
            brokers.set(0)
            stand.until(lambda: stand.rows().total() == 4 * stand.fed + 3, "rows of a group that closes by time-out")
            stand.until(lambda: stand.closings().total() == stand.fed + 1, "its closing, a commit of its own")
        finally:
            stand.curate.process.kill()
            stand.dispatch.process.kill()
    assert set(stand.rows().values()) == {1}
    assert stand.closings() == {("complete", 4): stand.fed, ("timeout", 3): 1}
    dispatched = stand.table("dispatches")
    assert {row["event"] for row in dispatched} == {"opened"}
    assert max(Counter(row["group_id"] for row in dispatched).values()) == 1
    times = [row["at"] for row in dispatched]
    assert max(times) - min(times) > timedelta(hours=3), "the clock has reached the dispatcher"
    assert min(stand.dispatch.num_ends, stand.curate.num_ends) >= 1, "each was started again when it was set back"
