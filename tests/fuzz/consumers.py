"""Hostile JSON messages through a real broker into everything that reads them: each is recorded or counted.

python -m tests.fuzz.consumers [--count 3000] [--seed 1]

The records flow and the dispatcher run as processes, which must be alive at the end; the followers of directives and
the queue of tasks are the learner's and the rollout service's own.
"""

import logging
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inference.orders import Orders
from inference.tasks import REFUSED, ShareGroupTasks
from infra import sql
from infra.kafka import Follower, Producer, ensure_topics
from infra.kafka.follower import UNDECODABLE
from infra.lake import Lake
from infra.stack.ports import free_port
from infra.stack.programs import ROOT
from schemas.errors import ContractError
from schemas.messages import (
    Branch,
    BufferMessage,
    BufferReport,
    ClosedGroup,
    Directive,
    EvalResult,
    FamilyScore,
    Fork,
    LearnerReport,
    Message,
    Task,
    TaskPosterior,
    UsageInterval,
    WeightSummary,
    decode,
)
from schemas.settings import Kafka, Settings
from schemas.topics import BUFFER, CONTROL, EVALS, TASKS, USAGE, WEIGHTS
from tests.conftest import running_broker
from tests.fuzz.tally import Tally, main
from tests.fuzz.values import as_json, mutated
from tests.samples import uid
from trainers.directives import Directives

TIMEOUT_S = 120
AT = datetime.now(UTC)


def _eval() -> Message:
    return EvalResult(
        eval_id="e", kind="full", requested_version=1, start_version=1, end_version=1, score=0.5, low=0.4, high=0.6,
        num_scored=10, num_unscored=0, started_at=AT, finished_at=AT,
        families={"add": FamilyScore(score=0.5, num_scored=10, num_unscored=0, by_task="1101001010")},
    )  # fmt: skip


def _usage() -> Message:
    return UsageInterval(
        interval_id="i", service="rollout", instance="r0", phase="rollout", started_at=AT, ended_at=AT, busy_s=1,
        idle_s=1, outbox="o", produced_trajectories=1, produced_tokens=2,
    )  # fmt: skip


def _weights() -> Message:
    return WeightSummary(version=1, fingerprint="f", num_bytes=1, train_step=1, created_at=AT)


def _directive() -> Message:
    return Directive(
        directive_id="d", target="all", issued_by="fuzz", issued_at=AT, reason="r", pause=False, min_weight_version=1,
        family_weights={"add": 1.0}, bucket_weights=(1.0, 1.0), learning_rate_scale=1.0,
    )  # fmt: skip


def _shard() -> Message:
    return BufferReport(
        shard="s000", at=AT, learner_version=1, trajectories={"admitted": 1}, tokens={}, live={0: 1}, num_pending=0,
        closed=(ClosedGroup(group_id=uid("g"), task_id="add/1", num_members=4, complete=True),),
        posteriors=(TaskPosterior(task_id="add/1", alpha=1, beta=1, weight_version=1),),
    )  # fmt: skip


def _fork() -> Message:
    branch = Branch(
        parent_id=uid("p"), group_id=uid("g"), group_index=1, attempt=1, token_ids=tuple(range(9)), actions=((2, 4),)
    )
    return Fork(group_id=uid("f"), num_branches=2, task_id="add/1", family="add", index=1, branch=branch)


def _learner() -> Message:
    return LearnerReport(at=AT, weight_version=1, train_step=1, num_available=4, num_consumed=0, needs_per_step=4)


def _task() -> Message:
    return Task(
        group_id=uid("g"), group_size=4, task_id="add/1", family="add", index=1, environment="calculator",
        options={"kind": "add"}, seed=0, draw=0, dispatched_at=AT, lease_until=AT,
    )  # fmt: skip


CLASSES: dict[str, tuple[str, Callable[[], Message], type[Any]]] = {
    "evals": (EVALS.name, _eval, EvalResult),
    "usage": (USAGE.name, _usage, UsageInterval),
    "weights": (WEIGHTS.name, _weights, WeightSummary),
    "directives": (CONTROL.name, _directive, Directive),
    "shard_reports": (BUFFER.name, _shard, BufferMessage),
    "forks": (BUFFER.name, _fork, BufferMessage),
    "learner_reports": (BUFFER.name, _learner, BufferMessage),
    "tasks": (TASKS.name, _task, Task),
}
"""Class -> its topic, a sound message, and the type that is read there."""

RECORDED = {EVALS.name: "evals", USAGE.name: "usage", WEIGHTS.name: "weights", CONTROL.name: "directives"}


def hostile(rng: random.Random, kind: str) -> bytes:
    """A message of a class with one thing changed in it; now and then with none."""
    document = CLASSES[kind][1]().model_dump(mode="json")
    return as_json(rng, mutated(rng, document) if rng.random() < 0.9 else document)


def readable(kind: str, body: bytes) -> bool:
    """Whether `body` keeps the schema."""
    try:
        decode(CLASSES[kind][2], body)
    except ContractError:
        return False
    return True


def fuzz(count: int, seed: int) -> Tally:
    """Send `count` messages, a class after the other, and compare what each consumer did with what was sent."""
    with tempfile.TemporaryDirectory(prefix="lagoon-fuzz-") as name, running_broker(Path(name)) as address:
        return through(Kafka(brokers=address, topic_prefix="fuzz."), Path(name), count, seed)


def through(kafka: Kafka, folder: Path, count: int, seed: int) -> Tally:
    """As `fuzz`, through a broker that runs."""
    settings = _settings(kafka, folder)
    settings.save(folder / "settings.json")
    ensure_topics(kafka, 30)
    lake, tally = Lake.of(settings), Tally()
    lake.ensure()
    sent = _send(kafka, tally, count, random.Random(seed))
    _follow(kafka, tally, sent)  # before there is a dispatcher, which sends tasks of its own
    with _serving("flows.records", folder) as records, _serving("flows.dispatch", folder) as dispatch:
        _record(lake, tally, sent, records)
        _hear(tally, sent, dispatch)
    return tally


def _settings(kafka: Kafka, folder: Path) -> Settings:
    return Settings.model_validate(
        {
            "run": {"name": "fuzz", "data_dir": str(folder)},
            "kafka": kafka.model_dump(),
            "loop": {"group_size": 4, "batch_size": 4},
            "curate": {"group_timeout_s": 1, "epoch_s": 0.5},
            "families": [{"name": "add"}],
        }
    )


def _send(kafka: Kafka, tally: Tally, count: int, rng: random.Random) -> dict[str, Counter[str]]:
    """Send; returns, per topic, how many messages can be read and how many cannot."""
    producer, sent = Producer(kafka, "fuzz"), {topic: Counter[str]() for topic, *_ in CLASSES.values()}
    kinds = list(CLASSES)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        topic, body = CLASSES[kind][0], hostile(rng, kind)
        tally.sent[topic] += 1
        is_clock = topic == CONTROL.name and readable(kind, body) and decode(Directive, body).target == "clock"
        sent[topic]["clock" if is_clock else "good" if readable(kind, body) else "bad"] += 1
        producer.send(topic, "fuzz", body, partition=0)
    producer.flush(60)
    producer.close()
    return sent


def _follow(kafka: Kafka, tally: Tally, sent: dict[str, Counter[str]]) -> None:
    """The learner's directives, the rollout service's orders and tasks."""
    control = sent[CONTROL.name]
    before = UNDECODABLE.labels(kafka.topic(CONTROL.name))._value.get()
    Directives(Follower(kafka, CONTROL.name, Directive, "fuzz-learner")).poll(1, 3)
    orders = Orders.of(kafka, "fuzz-rollout")
    orders.poll(1, 3)
    orders.close()
    counted = UNDECODABLE.labels(kafka.topic(CONTROL.name))._value.get() - before
    if counted != 2 * control["bad"]:  # two followers
        tally.faults.append(f"control: followers counted {counted} bad messages, expected twice {control['bad']}")
    tasks, taken, refused = ShareGroupTasks(kafka, "fuzz-tasks", lambda *_, **__: None), 0, REFUSED._value.get()
    deadline = time.monotonic() + TIMEOUT_S
    while taken + (bad := REFUSED._value.get() - refused) < sent[TASKS.name].total() and time.monotonic() < deadline:
        taken += len(tasks.next(100))
    tasks.close()
    tally.note(TASKS.name, "taken", taken)
    tally.note(TASKS.name, "refused and counted", int(bad))
    if (taken, bad) != (sent[TASKS.name]["good"], sent[TASKS.name]["bad"]):
        tally.faults.append(f"tasks: {taken} taken, {bad} refused; expected {sent[TASKS.name]}")


def _record(lake: Lake, tally: Tally, sent: dict[str, Counter[str]], process: "_Served") -> None:
    """Rows and dead letters of the records flow."""
    deadline, found = time.monotonic() + TIMEOUT_S, dict[str, tuple[int, int]]()
    expected = {topic: (sent[topic]["good"], sent[topic]["bad"]) for topic in RECORDED}
    total = sum(map(sum, expected.values()))
    while sum(map(sum, found.values())) < total and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
        found = _rows(lake)
    for topic, (rows, letters) in found.items():
        tally.note(topic, "rows", rows)
        tally.note(topic, "dead letters", letters)
        if clocks := sent[topic]["clock"]:
            tally.note(topic, "clock messages, which are no rows", clocks)
        fits = rows + letters == sum(expected[topic])  # a number that no column can hold is a dead letter, too
        if not fits or letters < expected[topic][1]:
            tally.faults.append(f"{topic}: {rows} rows, {letters} dead letters; expected {expected[topic]}")
    if process.poll() is not None:
        tally.faults.append(f"the records flow ended with status {process.returncode}: {process.last_words()}")


def _rows(lake: Lake) -> dict[str, tuple[int, int]]:
    with sql.connect(lake) as connection:
        letters = dict(connection.sql("SELECT topic, count(*) FROM dead_letters GROUP BY topic").fetchall())
        counts = {t: connection.sql(f"SELECT count(*) FROM {table}").fetchall()[0][0] for t, table in RECORDED.items()}
    return {topic: (count, letters.get(topic, 0)) for topic, count in counts.items()}


def _hear(tally: Tally, sent: dict[str, Counter[str]], process: "_Served") -> None:
    """What the dispatcher could not read, by its own count; it lives on."""
    deadline, bad = time.monotonic() + TIMEOUT_S, 0
    while bad < sent[BUFFER.name]["bad"] and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
        bad = process.counted(BUFFER.name)
    tally.note(BUFFER.name, "unreadable and counted", bad)
    tally.note(BUFFER.name, "heard", sent[BUFFER.name]["good"])
    if process.poll() is not None:
        tally.faults.append(f"the dispatcher ended with status {process.returncode}: {process.last_words()}")


class _Served(subprocess.Popen[bytes]):
    """A process, its metrics and its log."""

    port: int
    log: Path

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-1500:]

    def counted(self, topic: str) -> int:
        """Unreadable messages of `topic`, as Prometheus would see them."""
        name = f'lagoon_undecodable_messages_total{{topic="{topic}"}}'
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0  # it has not started yet, or has ended
        return next((int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(name)), 0)


@contextmanager
def _serving(module: str, folder: Path) -> Iterator[_Served]:
    port = free_port()
    command = [sys.executable, "-m", module, "--config", str(folder / "settings.json")]
    command.append(f"--telemetry.port={port}")
    with open(folder / f"{module}.log", "wb") as log:
        process = _Served(command, cwd=ROOT, stderr=log)
    process.port, process.log = port, folder / f"{module}.log"
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # a line for each message that is refused
    sys.exit(main("consumers", fuzz, 3000))
