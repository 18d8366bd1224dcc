"""Hostile messages through a real broker and the real curate process: does every one become a row, in bounded memory?

python -m tests.fuzz.messages [--count 10000] [--seed 1]

Exit status 0 if each message is accounted for exactly once (its rows in the ledger, or itself in dead_letters), no
class got further than it may, and the process stayed below MAX_RESIDENT_BYTES.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from infra import sql
from infra.kafka import Producer, ensure_topics
from infra.lake import Lake
from infra.stack.programs import ROOT
from schemas.errors import ContractError
from schemas.ids import partition_of
from schemas.messages import Directive, WeightSummary
from schemas.settings import Kafka, Settings
from schemas.topics import CONTROL, TRAJECTORIES, WEIGHTS
from schemas.wire import decode
from tests.conftest import running_broker
from tests.fuzz.classes import CLASSES
from tests.samples import NOON

MAX_RESIDENT_BYTES = 1024**3
"""The most memory that the flow's process may take."""

TIMEOUT_S = 300
GROUP_TIMEOUT_S = 1.0
LETTERS_ONLY = frozenset({"random_bytes", "bomb", "schema_version"})
NEVER_ADMITTED = frozenset({*LETTERS_ONLY, "not_finite", "unequal_lengths"})

Place = tuple[int, int]
"""Partition and offset."""


class Message(NamedTuple):
    """A message that was sent: its class, and the trajectories in it; 0 where nobody can read it."""

    kind: str
    num_rows: int


class Result(NamedTuple):
    """What became of the messages."""

    messages: dict[Place, Message]
    rows: dict[Place, Counter[str]]
    letters: Counter[Place]
    num_repeated_rows: int
    peak_bytes: int
    exit_status: int

    def faults(self) -> list[str]:
        """What is wrong, in words; empty if nothing."""
        found = [
            f"{place} {m}: {self._found(place)}" for place, m in self.messages.items() if not self._is_right(place)
        ]
        strangers = (set(self.rows) | set(self.letters)) - set(self.messages)
        found += [f"rows of messages that nobody sent: {sorted(strangers)[:5]}"] if strangers else []
        found += [f"{self.num_repeated_rows} rows of the log have two outcomes"] if self.num_repeated_rows else []
        if self.peak_bytes > MAX_RESIDENT_BYTES:
            found.append(f"{self.peak_bytes} bytes of memory, expected at most {MAX_RESIDENT_BYTES}")
        if self.exit_status:
            found.append(f"the flow ended with status {self.exit_status}")
        return found

    def lines(self) -> Iterator[str]:
        """Per class: messages and trajectories in, rows out by event."""
        for kind in CLASSES:
            places = [place for place, message in self.messages.items() if message.kind == kind]
            events = sum((self.rows.get(place, Counter()) for place in places), Counter[str]())
            letters = sum(self.letters[place] for place in places)
            trajectories = sum(self.messages[place].num_rows for place in places)
            told = "".join(f", {count} {event}" for event, count in sorted(events.items()))
            balanced = all(map(self._is_right, places))
            yield (
                f"{kind:<18} {len(places):>6} messages ({trajectories} readable trajectories) = {letters} dead letters"
                f"{told}: {'balanced' if balanced else 'NOT BALANCED'}"
            )

    def _is_right(self, place: Place) -> bool:
        kind, num_rows = self.messages[place]
        events = self.rows.get(place, Counter())
        counted = events.total() == num_rows and self.letters[place] == (0 if num_rows else 1)
        allowed = (kind not in LETTERS_ONLY or not num_rows) and (kind not in NEVER_ADMITTED or not events["admitted"])
        return counted and allowed and (kind != "sound" or not events["invalid"])

    def _found(self, place: Place) -> str:
        return f"{dict(self.rows.get(place, {}))}, {self.letters[place]} dead letters"


def fuzz(kafka: Kafka, folder: Path, count: int, seed: int) -> Result:
    """Send `count` messages, a class after the other, to fresh topics of `kafka`, and curate them in a process."""
    settings = _settings(kafka, folder)
    settings.save(folder / "settings.json")
    ensure_topics(kafka, 30)
    lake = Lake.of(settings)
    lake.ensure()
    with _serving(folder) as process:
        messages = _send(kafka, count, random.Random(seed))
        _wait(kafka, lake, process, messages)
        peak_bytes = _peak_bytes(process.pid) if process.poll() is None else 0
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    rows, repeated = _rows(lake)
    return Result(messages, rows, _letters(lake), repeated, peak_bytes, process.returncode)


def _peak_bytes(pid: int) -> int:
    """The most memory that process `pid` has had; its `ru_maxrss` would count what its parent had when it forked."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def _settings(kafka: Kafka, folder: Path) -> Settings:
    return Settings.model_validate(
        {
            "run": {"name": "fuzz", "data_dir": str(folder)},
            "kafka": kafka.model_dump(),
            "loop": {"group_size": 4, "batch_size": 4},
            "curate": {"group_timeout_s": GROUP_TIMEOUT_S, "epoch_s": 0.5},
        }
    )


@contextmanager
def _serving(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "flows.curate", "--config", str(folder / "settings.json")]
    with open(folder / "curate.log", "wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            process.wait(10)


def _send(kafka: Kafka, count: int, rng: random.Random) -> dict[Place, Message]:
    """Send the messages; the offsets of fresh partitions count from 0, in the order of sending."""
    producer, kinds = Producer(kafka, "fuzz"), list(CLASSES)
    summary = WeightSummary(version=1, fingerprint="f", num_bytes=1, train_step=1, created_at=NOON)
    producer.send(WEIGHTS.name, "1", summary.to_bytes())
    producer.flush(30)
    ends, messages = Counter[int](), dict[Place, Message]()
    for number in range(count):
        kind = kinds[number % len(kinds)]
        sent = CLASSES[kind](rng, number)
        partition = partition_of(sent.task_id, kafka.partitions)
        producer.send(TRAJECTORIES.name, "fuzz", sent.body, headers=sent.headers, partition=partition)
        messages[partition, ends[partition]] = Message(kind, _num_rows(sent.body))
        ends[partition] += 1
    producer.flush(60)
    producer.close()
    return messages


def _num_rows(body: bytes) -> int:
    try:
        return decode(body).num_rows
    except ContractError:
        return 0


def _wait(kafka: Kafka, lake: Lake, process: subprocess.Popen[bytes], messages: dict[Place, Message]) -> None:
    """Let time pass until nothing is in flight, or there are no news for a long time."""
    producer, deadline = Producer(kafka, "fuzz-clock"), time.monotonic() + TIMEOUT_S
    expected = sum(max(1, message.num_rows) for message in messages.values())
    while time.monotonic() < deadline and process.poll() is None:
        order = Directive(directive_id="c", target="clock", issued_by="fuzz", issued_at=datetime.now(UTC))
        producer.send(CONTROL.name, "clock", order.to_bytes())
        producer.flush(20)
        if sum(rows.total() for rows in _rows(lake)[0].values()) + _letters(lake).total() >= expected:
            return
        time.sleep(0.5)


def _rows(lake: Lake) -> tuple[dict[Place, Counter[str]], int]:
    """Events by message, later ones (evicted, expired) left out; and how many rows of the log have more than one."""
    query = """SELECT partition, "offset", event, count(*), count(*) - count(DISTINCT row) FROM ledger
        WHERE event NOT IN ('evicted', 'expired') GROUP BY ALL"""
    rows: dict[Place, Counter[str]] = {}
    repeated = 0
    with sql.connect(lake) as connection:
        for partition, offset, event, count, more in connection.sql(query).fetchall():
            rows.setdefault((partition, offset), Counter())[event] += count
            repeated += more
    return rows, repeated


def _letters(lake: Lake) -> Counter[Place]:
    query = """SELECT partition, "offset", count(*) FROM dead_letters WHERE kind = 'undecodable' GROUP BY ALL"""
    with sql.connect(lake) as connection:
        return Counter({(partition, offset): n for partition, offset, n in connection.sql(query).fetchall()})


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each class, and what is wrong."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.messages")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lagoon-fuzz-") as name:
        folder = Path(name)
        with running_broker(folder) as address:
            result = fuzz(Kafka(brokers=address, topic_prefix="fuzz."), folder, args.count, args.seed)
    print(*result.lines(), sep="\n")
    print(f"peak memory of the flow: {result.peak_bytes / 1024**2:.0f} MiB (bound {MAX_RESIDENT_BYTES / 1024**2:.0f})")
    faults = result.faults()
    print(*faults[:20], f"{len(faults)} faults in {args.count} messages, {time.monotonic() - started:.0f} s", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
