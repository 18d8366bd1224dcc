"""A rollout service without an engine: groups of known fate, through the real outbox, packer and sender.

python -m tests.chaos.generator --config SETTINGS.json --journal FILE [--rate N] [--seed S]

Journal and outbox are its only state, so it can be killed at any point and started again. SIGTERM drains it.
"""

import argparse
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from inference.outbox import Outbox
from inference.packs import Packer
from inference.sender import Sender
from infra.kafka import Producer
from infra.kafka.producer import OnDelivery
from infra.telemetry import Stop
from infra.usage import Usage
from schemas.errors import BrokerError
from schemas.messages import Directive, WeightSummary
from schemas.names import Phase, Service
from schemas.settings import Settings, load
from schemas.topics import CONTROL, WEIGHTS
from schemas.trajectory import Trajectory
from tests.chaos.making import FIRST_VERSION, kind_of, make
from tests.chaos.record import Entry, Fate, Journal

NAME = "generator"
CLOCK_S = 0.2
LINGER_S = 0.2
GROUPS_PER_VERSION = 40
DRAIN_S = 60.0


class Spoiling:
    """A producer that spoils the messages of groups which are to become dead letters, each time in the same way."""

    def __init__(self, producer: Producer, spoiled: set[str]) -> None:
        self._producer, self._spoiled = producer, spoiled

    def send(
        self, topic: str, key: str, value: bytes, *, headers: dict[str, bytes], partition: int, on_delivery: OnDelivery
    ) -> None:
        body = b"spoiled" + value[7:] if key in self._spoiled else value  # as long: its headers are believed so far
        self._producer.send(topic, key, body, headers=headers, partition=partition, on_delivery=on_delivery)


class Generator:
    """Makes groups, writes them down, hands them to the outbox and sees them into Kafka."""

    def __init__(self, settings: Settings, journal: Journal, seed: int, name: str = NAME) -> None:
        self.journal, self.seed = journal, seed
        self._spoiled = {e.group_id for e in journal.entries if e.fate == Fate.DEAD_LETTER}
        self.outbox = Outbox(settings.run.folder / "outbox" / name, settings.rollout.outbox_bytes)
        self.producer = Producer(settings.kafka, name)
        spoiling = Spoiling(self.producer, self._spoiled)
        self._packer = Packer(LINGER_S)
        self.sender = Sender.of(settings, self.outbox, self._packer, spoiling)
        self.usage = Usage(self.producer, Service.ROLLOUT, name, Phase.ROLLOUT, settings.telemetry.usage_s)
        last = journal.entries[-1] if journal.entries else None
        self.number = last.number + 1 if last else 0
        self.version = last.version if last else FIRST_VERSION
        self._clock_at = 0.0

    def start(self) -> None:
        """Take up what an earlier life had written down but not handed over, and announce the version."""
        self._hand_over(self._left_over())
        self._publish(self.version)

    def make_group(self) -> None:
        """The next group. A version ends when Kafka has all that was made at it, so that no fate hangs on timing."""
        if self.number and not self.number % GROUPS_PER_VERSION:
            self.drain()
            self.version += 1
            self._publish(self.version)
        made = make(self.seed, kind_of(self.seed, self.number), self.number, self.version)
        self.number += 1
        self.journal.append([entry for _, entry in made])
        self._hand_over(made)

    def tick(self, force: bool = False) -> None:
        """Send what may go, let time pass, account."""
        self.sender.send(force)
        if time.monotonic() - self._clock_at > CLOCK_S:
            self._clock_at = time.monotonic()
            clock = Directive(directive_id="clock", target="clock", issued_by=NAME, issued_at=datetime.now(UTC))
            self.producer.send(CONTROL.name, "clock", clock.to_bytes(), on_delivery=_the_next_will_do)
            self.outbox.sync()
            self.usage.produced(self.outbox.id, self.outbox.num_trajectories, self.outbox.num_tokens)
            self.usage.tick(force)
        self.producer.poll()

    def drain(self) -> None:
        """Send everything.

        Raises:
            BrokerError: Kafka has not taken it within DRAIN_S.
        """
        deadline = time.monotonic() + DRAIN_S
        while not self.outbox.is_empty:
            if time.monotonic() > deadline:
                raise BrokerError(f"Kafka has not taken the outbox within {DRAIN_S:g} s: {self.sender.error}")
            self.tick(force=True)
            time.sleep(0.01)

    def close(self) -> None:
        """Drain, tell the totals, end."""
        self.drain()
        self._clock_at = 0.0
        self.tick(force=True)
        self.sender.close()
        self.producer.close()
        self.outbox.close()
        self.journal.close()

    def _left_over(self) -> list[tuple[Trajectory, Entry]]:
        """The journal is ahead of the outbox by what a kill came between; both are in one order."""
        missing = self.journal.entries[self.outbox.num_trajectories :]
        if not missing:
            return []
        first = missing[0].number
        start = next(i for i, e in enumerate(self.journal.entries) if e.number == first)
        made = [
            pair
            for number, kind, version in dict.fromkeys((e.number, e.kind, e.version) for e in missing)
            for pair in make(self.seed, kind, number, version)
        ]
        made = made[self.outbox.num_trajectories - start :]
        torn = made[len(missing) :]  # of the last group, where the journal's end was cut off
        self.journal.append([entry for _, entry in torn])
        return made

    def _hand_over(self, made: Sequence[tuple[Trajectory, Entry]]) -> None:
        for trajectory, entry in made:
            if entry.fate == Fate.DEAD_LETTER:
                self._spoiled.add(entry.group_id)
            self._packer.started(trajectory.group_id, 1)
        for trajectory, _ in made:
            self.sender.finished(trajectory)

    def _publish(self, version: int) -> None:
        now = datetime.now(UTC)
        summary = WeightSummary(version=version, fingerprint="f" * 64, num_bytes=1, train_step=version, created_at=now)
        self.producer.send(WEIGHTS.name, str(version), summary.to_bytes())
        self.producer.flush(DRAIN_S)


def _the_next_will_do(error: BrokerError | None) -> None:
    """A clock message that Kafka did not take is not missed."""


def serve(generator: Generator, rate: float, stop: Stop) -> None:
    """Make `rate` groups a second until `stop` is set; then drain."""
    generator.start()
    due = time.monotonic()
    while not stop:
        generator.tick()
        if time.monotonic() >= due:
            generator.make_group()
            due = max(due + 1 / rate, time.monotonic() - 1)
        stop.wait(min(0.01, max(0.0, due - time.monotonic())))
    generator.close()


def main(argv: Sequence[str] | None = None) -> None:
    """The process."""
    parser = argparse.ArgumentParser(prog="tests.chaos.generator")
    parser.add_argument("--config", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=10.0, help="groups a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default=NAME, help="of its outbox")
    args = parser.parse_args(argv)
    stop = Stop().on_signals()
    serve(Generator(load([args.config]), Journal(args.journal), args.seed, args.name), args.rate, stop)


if __name__ == "__main__":
    main()
