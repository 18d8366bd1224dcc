"""Kafka to Delta exactly once, by really killing: at fail-points, at random, with one and two workers."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from flows.cluster import ADDRESSES, PROCESS_ID
from flows.run import recovery_store
from infra.kafka import Producer, ensure_topics
from infra.lake import Lake
from infra.stack.ports import free_port
from schemas.messages import Directive, UsageInterval
from schemas.settings import Kafka, Settings

ROOT = Path(__file__).parents[2]
COPY = [str(Path(__file__).with_name("copy_flow.py"))]
RECORDS = ["-m", "flows.records"]
FAIL_POINTS = ("sink.after_stage", "sink.before_commit", "sink.after_commit")
NOW = datetime(2026, 11, 29, tzinfo=UTC)
LIMIT_S = 120.0

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


class Run:
    """A run's folder and topics, and the processes that work on it."""

    def __init__(self, kafka: Kafka, folder: Path, **curate: object) -> None:
        self.folder = folder
        self.configure(kafka, **curate)
        ensure_topics(kafka)
        self.lake = Lake.of(self.settings)
        self.lake.ensure()
        self.producer = Producer(kafka, "test")

    def configure(self, kafka: Kafka, **curate: object) -> None:
        sections = {"run": {"data_dir": str(self.folder)}, "kafka": kafka, "curate": {"epoch_s": 0.2, **curate}}
        self.settings = Settings.model_validate(sections)
        self.settings.save(self.folder / "settings.json")

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *command, "--config", str(self.folder / "settings.json")],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
            stderr=open(self.folder / "log", "a"),
            text=True,
        )

    def wait_started(self, process: subprocess.Popen[str]) -> None:
        """Wait until the process has reported itself, or has ended."""
        files, mark = self.settings.run.folder / "services", f'"pid": {process.pid}'
        wait_until(lambda: process.poll() is not None or any(mark in f.read_text() for f in files.glob("*.json")))

    def finish(self, command: Sequence[str]) -> tuple[int, str]:
        """Exit code and log of a process that is to end by itself."""
        (self.folder / "log").write_text("")
        code = self.start(command).wait(LIMIT_S)
        return code, (self.folder / "log").read_text()

    def send(self, topic: str, count: int, partitions: int = 1, body: Callable[[int], bytes] = lambda n: b"x") -> None:
        for n in range(count):
            self.producer.send(topic, "key", body(n), partition=n % partitions)
        self.producer.flush(30)

    def rows(self, table: str, *columns: str) -> Counter[tuple]:
        self.lake.version(table)
        found = self.lake.table(table).to_pyarrow_table(columns=list(columns))
        return Counter(tuple(row.values()) for row in found.to_pylist())


@pytest.fixture
def run(kafka: Kafka, tmp_path: Path) -> Run:
    return Run(kafka, tmp_path)


def kill_again_and_again(run: Run, command: Sequence[str], lives: int, send: Callable[[], None]) -> None:
    """Send and kill, `lives` times: at each fail-point the first time it is reached, then at random moments."""
    chance = random.Random(7)
    for life in range(lives):
        certain = f"{FAIL_POINTS[life]}=1" if life < len(FAIL_POINTS) else ",".join(f"{p}=0.2" for p in FAIL_POINTS)
        process = run.start(command, LAGOON_FAILPOINTS=certain, BYTEWAX_WORKERS_PER_PROCESS=str(1 + life % 2))
        send()
        run.wait_started(process)
        try:
            code = process.wait(LIMIT_S if life < len(FAIL_POINTS) else chance.uniform(0.5, 3))
            assert code == -signal.SIGKILL, (run.folder / "log").read_text()[-3000:]
        except subprocess.TimeoutExpired:
            assert life >= len(FAIL_POINTS), f"{certain} did not strike"
            process.kill()
            process.wait()
        send()


def test_no_message_is_missing_or_twice_however_the_flow_dies(run: Run) -> None:
    def send() -> None:
        run.send("trajectories", 40, partitions=4)
        run.send("control", 5)
        run.send("weights", 2)

    lives = 7
    kill_again_and_again(run, COPY, lives, send)
    code, log = run.finish([*COPY, "--bounded"])
    assert code == 0, log[-3000:]
    expected = {("trajectories", p, n, f"lane {p}"): 1 for p in range(4) for n in range(lives * 20)}
    expected |= {("control", 0, n, f"lane {lane}"): 1 for lane in range(4) for n in range(lives * 10)}
    expected |= {("weights", 0, n, f"lane {lane}"): 1 for lane in range(4) for n in range(lives * 4)}
    assert run.rows("dead_letters", "topic", "partition", "offset", "error") == expected


def test_records_are_written_once_however_the_flow_dies(run: Run) -> None:
    sent: list[str] = []

    def interval(_: int) -> bytes:
        sent.append(str(uuid.uuid4()))
        names = {"interval_id": sent[-1], "service": "rollout", "instance": "r0", "phase": "rollout"}
        return UsageInterval(**names, started_at=NOW, ended_at=NOW, busy_s=1, idle_s=0).to_bytes()

    def clock(n: int) -> bytes:
        return Directive(directive_id=f"c{n}", target="clock", issued_by="dispatch", issued_at=NOW).to_bytes()

    def send() -> None:
        run.send("usage", 10, body=interval)
        run.send("control", 3, body=clock)
        run.send("evals", 1)

    kill_again_and_again(run, RECORDS, 4, send)
    process = run.start(RECORDS)
    wait_until(lambda: len(run.rows("usage", "interval_id")) == len(sent))
    wait_until(lambda: len(run.rows("dead_letters", "offset")) == 8)  # topics are read, and tables written, one by one
    process.terminate()
    assert process.wait(LIMIT_S) == 0
    assert run.rows("usage", "interval_id") == {(i,): 1 for i in sent}
    assert run.rows("dead_letters", "topic", "offset") == {("evals", n): 1 for n in range(8)}
    assert not run.rows("directives", "directive_id")


def test_a_stopped_flow_leaves_nothing_pending(run: Run) -> None:
    process = run.start(COPY)
    run.send("trajectories", 40, partitions=4)
    run.send("control", 1)
    wait_until(lambda: run.rows("dead_letters", "topic").total() > 0)
    run.send("trajectories", 40, partitions=4)
    process.terminate()
    assert process.wait(LIMIT_S) == 0
    assert staged(run, "dead_letters") == set()
    assert run.finish([*COPY, "--bounded"])[0] == 0
    rows = run.rows("dead_letters", "topic", "partition", "offset", "error")
    assert set(rows.values()) == {1}
    assert rows.total() == 80 + 4


def staged(run: Run, table: str) -> set[str]:
    """Files that were written and are not in the table."""
    run.lake.version(table)
    written = {file.name for file in Path(run.lake.table_uri(table)).rglob("part-*")}
    return written - {Path(uri).name for uri in run.lake.table(table).file_uris()}


def test_a_flow_runs_under_the_launcher_of_bytewax_on_the_same_store(run: Run) -> None:
    store = recovery_store(run.settings.run.folder / "recovery" / "records")
    command = [sys.executable, "-m", "bytewax.run", "flows.records", "-r", str(store), "-s", "1", "-b", "10"]
    environment = {"LAGOON_SETTINGS": str(run.folder / "settings.json"), "PYTHONPATH": str(ROOT)}
    run.send("evals", 1)
    process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: run.rows("dead_letters", "offset").total() == 1)
    finally:
        process.kill()
        process.wait()
    run.send("evals", 1)
    process = run.start(RECORDS)
    wait_until(lambda: run.rows("dead_letters", "offset").total() >= 2)
    process.terminate()
    assert process.wait(LIMIT_S) == 0
    assert run.rows("dead_letters", "topic", "offset") == {("evals", 0): 1, ("evals", 1): 1}


def read_up_to_100(run: Run) -> None:
    """A flow that has read offsets 0 to 99 of `trajectories`/0 and ended."""
    run.send("trajectories", 100)
    assert run.finish([*COPY, "--bounded"])[0] == 0
    assert run.rows("dead_letters", "topic").total() == 100


def test_expired_offsets_stop_the_flow_which_names_the_hole_and_the_setting(run: Run) -> None:
    read_up_to_100(run)
    run.send("trajectories", 900)
    place = TopicPartition(run.settings.kafka.topic("trajectories"), 0, 500)
    admin = AdminClient({"bootstrap.servers": run.settings.kafka.brokers})
    admin.delete_records([place])[place].result(30)

    code, log = run.finish([*COPY, "--bounded"])
    assert code == 1
    assert "[100,500)" in log
    assert "400 messages" in log
    assert "curate.skip_expired_offsets" in log

    run.configure(run.settings.kafka, skip_expired_offsets=True)
    for _ in range(2):
        code, log = run.finish([*COPY, "--bounded"])
        assert code == 0, log[-3000:]
    rows = run.rows("dead_letters", "kind", "topic", "partition", "offset")
    messages = [*range(100), *range(500, 1000)]
    expected = {("undecodable", "trajectories", 0, n): 1 for n in messages}
    assert rows == expected | {("hole", "trajectories", 0, 100): 1}


def test_a_broker_that_comes_back_empty_stops_the_flow(run: Run) -> None:
    read_up_to_100(run)
    topic = run.settings.kafka.topic("trajectories")
    admin = AdminClient({"bootstrap.servers": run.settings.kafka.brokers})
    admin.delete_topics([topic])[topic].result(30)
    wait_until(lambda: topic not in admin.list_topics(timeout=10).topics)
    ensure_topics(run.settings.kafka)
    code, log = run.finish([*COPY, "--bounded"])
    assert code == 1
    assert "ends at offset 0, but had been read up to 100" in log


def test_partitions_that_are_added_stop_the_flow_by_name_and_stay_refused(run: Run) -> None:
    process = run.start(COPY)
    run.send("trajectories", 8, partitions=4)
    wait_until(lambda: run.rows("dead_letters", "offset").total() == 8)
    topic, kafka = run.settings.kafka.topic("trajectories"), run.settings.kafka
    admin = AdminClient({"bootstrap.servers": kafka.brokers})
    admin.create_partitions([NewPartitions(topic, 8)])[topic].result(30)
    assert process.wait(LIMIT_S) == 1
    assert f"{topic} has 8 partitions now, and 4 are read" in (run.folder / "log").read_text()

    run.configure(kafka.model_copy(update={"partitions": 8}))
    code, log = run.finish([*COPY, "--bounded"])
    assert code == 2
    assert "kafka.partitions is 8, but the recovery store" in log
    assert "was written with 4" in log


@pytest.mark.timeout(900)
def test_a_flow_may_be_rescaled_and_stays_one_history(run: Run) -> None:
    for sent, number in enumerate((2, 3, 1), 1):
        cluster = start_cluster(run, COPY, number)
        run.send("trajectories", 40, partitions=4)
        run.send("control", 2)
        wait_until(lambda n=sent * (40 + 2 * 4): run.rows("dead_letters", "topic").total() == n, 200)
        for process in cluster:
            process.terminate()
        assert [process.wait(LIMIT_S) for process in cluster] == [0] * number
    expected = {("trajectories", p, n, f"lane {p}"): 1 for p in range(4) for n in range(30)}
    expected |= {("control", 0, n, f"lane {lane}"): 1 for lane in range(4) for n in range(6)}
    assert run.rows("dead_letters", "topic", "partition", "offset", "error") == expected


def start_cluster(run: Run, command: Sequence[str], number: int) -> list[subprocess.Popen[str]]:
    """The processes of one flow."""
    addresses = ";".join(f"127.0.0.1:{free_port()}" for _ in range(number))
    return [run.start(command, **{ADDRESSES: addresses, PROCESS_ID: str(n)}) for n in range(number)]


def wait_until(condition: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.1)
