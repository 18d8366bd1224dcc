"""The curate flow on a real broker and a real lake: every outcome occurs, the books balance, a replay decides alike."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from bytewax.errors import BytewaxRuntimeError
from bytewax.recovery import RecoveryConfig
from bytewax.testing import run_main
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from flows import curate
from flows.run import recovery_store
from infra import sql
from infra.kafka import Producer, ensure_topics
from infra.lake import Lake
from infra.stack.programs import ROOT
from schemas.ids import partition_of
from schemas.messages import Directive, WeightSummary
from schemas.names import Event, Header
from schemas.settings import Kafka, Settings
from schemas.topics import CONTROL, TRAJECTORIES, WEIGHTS
from schemas.trajectory import Trajectory
from schemas.wire import pack
from tests.samples import NOON, group, uid

pytestmark = pytest.mark.kafka

GROUP_TIMEOUT_S = 0.3
LIMIT_S = 120
NOT_ARROW = b"not Arrow, and long enough for 24 tokens"


class Rollout:
    """Sends packs as a rollout service does, and counts what it has produced."""

    def __init__(self, kafka: Kafka) -> None:
        self.kafka, self.producer = kafka, Producer(kafka, "test-rollout")
        self.sequence = self.trajectories = self.tokens = 0

    def send(self, trajectories: Sequence[Trajectory], body: bytes | None = None, repeat: bool = False) -> None:
        """Send one message; `body` replaces what it says, `repeat` sends it a second time."""
        packed, headers = pack(trajectories)
        self.sequence += 1
        headers |= {Header.OUTBOX: b"o1", Header.SEQUENCE: str(self.sequence).encode()}
        for _ in range(1 + repeat):
            self.producer.send(
                TRAJECTORIES.name,
                trajectories[0].group_id,
                packed if body is None else body,
                headers=headers,
                partition=partition_of(trajectories[0].task_id, self.kafka.partitions),
            )
        self.trajectories += len(trajectories)
        self.tokens += sum(len(t.token_ids) for t in trajectories)
        self.producer.flush(20)

    def publish(self, version: int) -> None:
        """Announce a weight version."""
        summary = WeightSummary(version=version, fingerprint="f", num_bytes=1, train_step=1, created_at=NOON)
        self.producer.send(WEIGHTS.name, str(version), summary.to_bytes())
        self.producer.flush(20)

    def let_time_pass(self, seconds: float) -> None:
        """Send clock messages for as long."""
        deadline = time.monotonic() + seconds
        while True:
            over = time.monotonic() > deadline
            order = Directive(directive_id="c", target="clock", issued_by="test", issued_at=datetime.now(UTC))
            self.producer.send(CONTROL.name, "clock", order.to_bytes())
            self.producer.flush(20)
            if over:
                return

    def produced(self, lake: Lake) -> None:
        """Write down, as the records flow would, what this outbox has finished."""
        row = {
            "interval_id": "i",
            "service": "rollout",
            "instance": "rollout-0",
            "phase": "rollout",
            "started_at": NOON,
            "ended_at": NOON,
            "busy_s": 0.0,
            "idle_s": 0.0,
            "num_accelerators": 1,
            "num_tokens": 0,
            "num_episodes": 0,
            "num_failed": 0,
            "outbox": "o1",
            "produced_trajectories": self.trajectories,
            "produced_tokens": self.tokens,
        }
        lake.append("usage", [row], "test", 1)


def settings_for(kafka: Kafka, folder: Path) -> Settings:
    return Settings.model_validate(
        {
            "run": {"name": "test", "data_dir": str(folder)},
            "kafka": kafka.model_dump(),
            "loop": {"group_size": 4, "batch_size": 4, "max_staleness": 3},
            "curate": {
                "capacity": 32,
                "max_evicted_share": 1.0,
                "group_timeout_s": GROUP_TIMEOUT_S,
                "epoch_s": 0.2,
            },
        }
    )


def everything_happens(rollout: Rollout) -> None:
    """A log in which every outcome occurs."""
    a, b, c, d, e = (group(name, [0.0, 1.0, 1.0, 0.0]) for name in "abcde")
    rollout.publish(1)
    rollout.send(a)  # admitted; capacity 32 is 2 a shard, so it stays as long as it is alone
    rollout.send(group("equal", [1.0] * 4))  # no_signal
    rollout.send(group("failed", [0.0, None, 1.0, 0.0]))  # one no_signal
    rollout.send([dataclasses.replace(b[0], reward=float("nan"))], repeat=True)  # invalid, then redelivered
    rollout.send([dataclasses.replace(a[1], trajectory_id=uid("again"))])  # duplicate
    rollout.send(d, body=NOT_ARROW)  # dead letter
    rollout.send(c[:3])  # closes by time-out
    rollout.let_time_pass(2 * GROUP_TIMEOUT_S)
    rollout.send(c[3:])  # late, when its group has been evicted
    rollout.publish(5)  # what is alive expires
    rollout.send(e)  # stale
    rollout.let_time_pass(2 * GROUP_TIMEOUT_S)


def run_to_the_end(settings: Settings) -> None:
    store = RecoveryConfig(recovery_store(settings.run.folder / "recovery" / "curate"))
    flow = curate.flow_for(settings, stop_at_end=True)
    run_main(flow, epoch_interval=timedelta(seconds=settings.curate.epoch_s), recovery_config=store)


def table(lake: Lake, name: str) -> list[dict[str, Any]]:
    handle = lake.table(name)
    handle.update_incremental()
    return sorted(handle.to_pyarrow_dataset().to_table().to_pylist(), key=repr)


@pytest.fixture
def settings(kafka: Kafka, tmp_path: Path) -> Settings:
    found = settings_for(kafka, tmp_path / "one")
    ensure_topics(kafka, 30)
    Lake.of(found).ensure()
    return found


def test_every_outcome_occurs_and_the_books_balance(settings: Settings) -> None:
    rollout, lake = Rollout(settings.kafka), Lake.of(settings)
    everything_happens(rollout)
    rollout.produced(lake)
    run_to_the_end(settings)

    events = [row["event"] for row in table(lake, "ledger")]
    assert {event: events.count(event) for event in set(events)} == {
        Event.ADMITTED: 4 + 3 + 3 + 1,  # a, failed, c and its late member
        Event.NO_SIGNAL: 4 + 1,
        Event.INVALID: 1,
        Event.DUPLICATE: 1,
        Event.REDELIVERED: 1,
        Event.STALE: 4,
        Event.EVICTED: 4 + 3 + 1,  # a; c, and its late member with it
        Event.EXPIRED: 3,  # failed
    }
    letters = table(lake, "dead_letters")
    assert [(row["value"], row["num_rows"], row["num_tokens"]) for row in letters] == [(NOT_ARROW, 4, 24)]
    closings = {row["closed_by"] for row in table(lake, "groups")}
    assert closings == {"complete", "timeout"}

    for row in sql.connect(lake).sql("select * from conservation").to_arrow_table().to_pylist():
        assert row["balanced"], row
        assert row["in_flight"] == 0, row
        assert row["produced"] == (rollout.trajectories if row["kind"] == "trajectories" else rollout.tokens)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_hole_in_the_log_stops_the_flow_and_is_never_green_when_it_may_go_on(kafka: Kafka, tmp_path: Path) -> None:
    """Offsets 0 to 999, the flow stands at 100, retention has removed what lies below 500.

    https://github.com/ClickHouse/clickhouse-kafka-connect/issues/511
    """
    roomy = settings_for(kafka, tmp_path).model_dump()
    roomy["curate"] |= {"capacity": 32_000, "group_timeout_s": 60}  # nothing is evicted, however slow this machine is
    settings = Settings.model_validate(roomy)
    ensure_topics(kafka, 30)
    rollout, lake = Rollout(kafka), Lake.of(settings)
    lake.ensure()
    members = [member for number in range(500) for member in group(number, [0.0, 1.0])]
    rollout.publish(1)
    for member in members[:100]:
        rollout.send([member])
    rollout.let_time_pass(0)
    run_to_the_end(settings)
    for member in members[100:]:
        rollout.send([member])
    place = TopicPartition(kafka.topic(TRAJECTORIES.name), partition_of("add/7", kafka.partitions), 500)
    admin = AdminClient({"bootstrap.servers": kafka.brokers})  # has to outlive its answer
    admin.delete_records([place])[place].result(30)
    rollout.let_time_pass(0)
    rollout.produced(lake)

    with pytest.raises(BytewaxRuntimeError) as raised:
        run_to_the_end(settings)
    said = "".join(traceback.format_exception(raised.value))
    assert "[100,500)" in said
    assert "curate.skip_expired_offsets" in said

    roomy["curate"] |= {"skip_expired_offsets": True}
    run_to_the_end(Settings.model_validate(roomy))
    assert [row["event"] for row in table(lake, "ledger")] == [Event.ADMITTED] * (100 + 500)
    [hole] = table(lake, "dead_letters")
    assert (hole["kind"], hole["offset"], hole["num_rows"]) == ("hole", 100, 400)
    query = "SELECT produced, in_flight, holes, balanced FROM conservation WHERE kind = 'trajectories'"
    assert sql.connect(lake).sql(query).fetchall() == [(1000, 400, 400, False)]


def test_a_replay_of_the_log_decides_the_same_row_for_row(settings: Settings, tmp_path: Path) -> None:
    everything_happens(Rollout(settings.kafka))
    run_to_the_end(settings)
    again = settings_for(settings.kafka, tmp_path / "two")
    Lake.of(again).ensure()
    run_to_the_end(again)
    for name in curate.TABLES:
        rows = table(Lake.of(again), name)
        assert rows == table(Lake.of(settings), name)
        assert rows


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_of_a_running_flow_change_no_decision(settings: Settings, tmp_path: Path) -> None:
    saved = tmp_path / "settings.json"
    settings.save(saved)
    rollout, lake = Rollout(settings.kafka), Lake.of(settings)
    rollout.publish(1)
    deaths, fed = [], 0
    for failpoint in ("sink.after_stage", "sink.before_commit", "sink.after_commit"):
        with serving(saved, f"{failpoint}=0.2") as process:
            deadline = time.monotonic() + LIMIT_S
            while process.poll() is None and time.monotonic() < deadline:
                rollout.send(group(fed, [0.0, 1.0, 1.0, 0.0])[: 4 if fed % 4 else 2])  # every fourth group stays open
                fed += 1
                time.sleep(0.1)
            deaths.append(process.poll())
    assert deaths == [-signal.SIGKILL] * 3
    rollout.let_time_pass(2 * GROUP_TIMEOUT_S)
    rollout.produced(lake)
    with serving(saved, "") as process:
        wait_until_balanced(lake, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0

    replayed = settings_for(settings.kafka, tmp_path / "two")
    Lake.of(replayed).ensure()
    run_to_the_end(replayed)
    for name in curate.TABLES:
        assert table(lake, name) == table(Lake.of(replayed), name)


@contextmanager
def serving(saved: Path, failpoints: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m flows.curate` as a process of its own, dead at the end."""
    environment = os.environ | {"LAGOON_FAILPOINTS": failpoints}
    command = [sys.executable, "-m", "flows.curate", "--config", str(saved)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def wait_until_balanced(lake: Lake, process: subprocess.Popen[bytes]) -> None:
    live, deadline = sql.Live(lake), time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        rows = live.ask("select in_flight, balanced from conservation")
        if rows and all(in_flight == 0 and balanced for in_flight, balanced in rows):
            return
        assert process.poll() is None
        time.sleep(0.3)
    raise AssertionError(f"not balanced within {LIMIT_S} s: {rows}")
