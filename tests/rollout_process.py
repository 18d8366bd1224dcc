"""A rollout service in its own process, and what it puts into Kafka."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition

from inference.engines.llama import Llama
from inference.outbox import Outbox
from inference.tokenizer import make_tokenizer, save_tokenizer
from infra.fingerprints import fingerprint_file
from infra.kafka import Follower, Producer, ensure_topics
from infra.weights import WeightStore, describe
from schemas import wire
from schemas.messages import Manifest, Probe, Task, UsageInterval
from schemas.names import Header
from schemas.settings import ENVIRONMENT_FILE, Kafka, Settings
from schemas.topics import TASKS, TRAJECTORIES, USAGE
from schemas.trajectory import Trajectory, from_batch
from tests.conftest import ROOT
from tests.policies import write_policy
from tests.rollout_fakes import NOW, task

GROUP_SIZE = 4
INSTANCE = "rollout-0"
DEADLINE_S = 120
PROBE = (5, 9, 17, 33, 65)


@dataclass
class Received:
    """A message of the `trajectories` topic."""

    partition: int
    outbox: str
    sequence: int
    body: bytes

    @property
    def rows(self) -> list[Trajectory]:
        return from_batch(wire.decode(self.body))


class Service:
    """A rollout service in its own process."""

    def __init__(self, settings: Settings, failpoints: str = "", instance: str = INSTANCE) -> None:
        self._settings, self.instance = settings, instance
        path = settings.run.folder / "settings.json"
        settings.save(path)
        environment = os.environ | {
            ENVIRONMENT_FILE: str(path),
            "LAGOON_INSTANCE": instance,
            "LAGOON_FAILPOINTS": failpoints,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        with open(settings.run.folder / "service.log", "ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "inference.serve"], env=environment, stderr=log)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def processor_s(self) -> float:
        """Seconds that it has spent on processors."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def health(self) -> tuple[bool, str]:
        """What `/healthz` says; not well while it cannot be asked."""
        file = self._settings.run.folder / "services" / f"rollout-{self.instance}.json"
        try:
            address = json.loads(file.read_text())
            with urllib.request.urlopen(f"http://{address['host']}:{address['port']}/healthz", timeout=5) as answer:
                status = json.load(answer)
        except urllib.error.HTTPError as error:
            status = json.load(error)
        except (OSError, ValueError) as error:
            return False, str(error)
        return status["ok"], status["reason"]

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


def assert_each_once(messages: list[Received], outbox: Outbox) -> None:
    """The topic holds what the outbox produced: nothing missing, and repetitions are recognizable as such."""
    bodies: dict[tuple[int, int], bytes] = {}
    order: dict[int, list[int]] = defaultdict(list)
    for message in messages:
        assert message.outbox == outbox.id
        place = (message.partition, message.sequence)
        if place not in bodies:
            order[message.partition].append(message.sequence)
        assert bodies.setdefault(place, message.body) == message.body
    assert all(seen == list(range(1, len(seen) + 1)) for seen in order.values())
    rows = [r for body in bodies.values() for r in from_batch(wire.decode(body))]
    assert max(Counter(r.trajectory_id for r in rows).values()) == 1
    assert outbox.is_empty
    assert len(rows) == outbox.num_trajectories
    assert sum(len(r.token_ids) for r in rows) == outbox.num_tokens


def prepare_rollouts(folder: Path, kafka: Kafka, drain_s: float = 10, create: bool = True) -> Settings:
    """Settings, topics, and weight version 1."""
    settings = Settings.model_validate(
        {
            "run": {"name": "test", "data_dir": str(folder)},
            "kafka": kafka.model_dump(),
            "rollout": {"max_episodes": 200, "drain_s": drain_s, "pack_linger_s": 0.05},
            "loop": {"group_size": GROUP_SIZE},
            "telemetry": {"usage_s": 0.5},
        }
    )
    if create:
        ensure_topics(kafka)
    policy = write_policy(folder / "policy")
    save_tokenizer(make_tokenizer([""]), policy)
    probe = Probe(token_ids=PROBE, logprobs=tuple(Llama(policy).logprobs(list(PROBE))))
    manifest = Manifest(
        version=1,
        files=describe(policy),
        fingerprint=fingerprint_file(policy / "model.safetensors"),
        probe=probe,
        created_at=NOW,
    )
    WeightStore.of(settings).publish(policy, manifest)
    return settings


def tasks_of(draws: object) -> list[Task]:
    return [
        task(draw, index=draw, group_size=GROUP_SIZE, options={"kind": "add"})
        for draw in draws  # type: ignore[attr-defined]
    ]


def send_tasks(kafka: Kafka, draws: object) -> None:
    send(kafka, tasks_of(draws))


def send(kafka: Kafka, tasks: list[Task]) -> None:
    """Send `tasks`, a few at a time: the broker hands out whole batches, and a service takes no part of one."""
    producer = Producer(kafka, "test")
    for number, one in enumerate(tasks, 1):
        producer.send(TASKS.name, one.group_id, one.to_bytes())
        if number % 5 == 0:
            producer.flush(30)
    producer.close()


def received(kafka: Kafka) -> list[Received]:
    """All messages of the topic now."""
    consumer = Consumer({"bootstrap.servers": kafka.brokers, "group.id": "test", "enable.auto.commit": False})
    topic, found = kafka.topic(TRAJECTORIES.name), []
    try:
        for partition in range(kafka.partitions):
            _, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
            consumer.assign([TopicPartition(topic, partition, 0)])
            left = end
            while left:
                for message in consumer.consume(left, timeout=1):
                    headers = {k: bytes(v or b"") for k, v in message.headers() or ()}
                    outbox, sequence = headers[Header.OUTBOX].decode(), int(headers[Header.SEQUENCE])
                    found.append(Received(partition, outbox, sequence, message.value() or b""))
                    left -= 1
    finally:
        consumer.close()
    return found


def members(kafka: Kafka) -> Counter[str]:
    """Members of each group in the topic, each counted once."""
    return Counter(group for group, _ in {(r.group_id, r.trajectory_id) for m in received(kafka) for r in m.rows})


def usage(kafka: Kafka) -> list[UsageInterval]:
    follower = Follower(kafka, USAGE.name, UsageInterval, "test")
    try:
        return list(follower.poll())
    finally:
        follower.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s"
        time.sleep(0.1)
