"""The rollout service as a process against a real broker: killed, cut off from Kafka, stopped."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from inference.engines.llama import Llama
from inference.outbox import Outbox
from inference.tokenizer import make_tokenizer, save_tokenizer
from infra.fingerprints import fingerprint_file
from infra.kafka import Follower, Producer, ensure_topics
from infra.stack.kafka import LocalKafka
from infra.stack.ports import free_port
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

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

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

    def __init__(self, settings: Settings, failpoints: str = "") -> None:
        self._settings = settings
        path = settings.run.folder / "settings.json"
        settings.save(path)
        environment = os.environ | {
            ENVIRONMENT_FILE: str(path),
            "LAGOON_INSTANCE": INSTANCE,
            "LAGOON_FAILPOINTS": failpoints,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        with open(settings.run.folder / "service.log", "ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "inference.serve"], env=environment, stderr=log)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def health(self) -> tuple[bool, str]:
        """What `/healthz` says; not well while it cannot be asked."""
        file = self._settings.run.folder / "services" / f"rollout-{INSTANCE}.json"
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
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def start() -> Iterator[Callable[..., Service]]:
    """Starts services, and ends what is left of them after the test."""
    started: list[Service] = []

    def one(settings: Settings, failpoints: str = "") -> Service:
        started.append(Service(settings, failpoints))
        return started[-1]

    yield one
    for service in started:
        if not service.has_ended:
            service.kill()


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen]]:
    """Starts one broker, again and again, on one port and one folder."""
    local = LocalKafka(ROOT / ".lagoon" / "kafka", tmp_path / "kafka" / "data", free_port(), free_port())
    running: list[subprocess.Popen] = []

    def up() -> subprocess.Popen:
        command = local.prepare()
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return running[-1]

    up.address = local.address  # type: ignore[attr-defined]
    yield up
    for process in running:
        process.kill()
        process.wait(10)


def test_a_service_killed_at_any_point_loses_no_finished_episode_and_counts_none_twice(
    tmp_path: Path, kafka: Kafka, start: Callable[..., Service]
) -> None:
    settings = _prepare(tmp_path, kafka)
    points = ("after_episode", "after_pack", "after_send", "before_acknowledgement")
    for attempt, point in enumerate(points, 1):
        _send_tasks(kafka, range(10 * attempt, 10 * attempt + 10))
        service = start(settings, f"outbox.{point}=0.2")
        _until(lambda s=service: s.has_ended)
        assert service.process.returncode == -signal.SIGKILL
    _send_tasks(kafka, range(100, 110))
    service = start(settings)
    last = {t.group_id for t in _tasks(range(100, 110))}
    _until(lambda: {r.group_id for m in _received(kafka) for r in m.rows} >= last)
    assert service.stop() == 0
    outbox = Outbox(settings.run.folder / "outbox" / INSTANCE, settings.rollout.outbox_bytes)
    _assert_each_once(_received(kafka), outbox)


def test_episodes_wait_for_kafka_and_are_sent_when_it_comes_back(
    tmp_path: Path, own_broker: Callable[[], subprocess.Popen], start: Callable[..., Service]
) -> None:
    broker = own_broker()
    kafka = Kafka(brokers=own_broker.address, partitions=2, timeout_s=2)  # type: ignore[attr-defined]
    ensure_topics(kafka.model_copy(update={"timeout_s": 60}), timeout_s=60)
    settings = _prepare(tmp_path, kafka, create=False)
    service = start(settings)
    _until(lambda: service.health()[0])
    _send_tasks(kafka, range(20))
    _until(lambda: bool(_received(kafka)))
    broker.kill()
    broker.wait(10)
    _until(lambda: "Kafka takes no episodes" in service.health()[1])
    own_broker()
    _until(lambda: service.health()[0])
    _send_tasks(kafka, range(100, 105))
    wanted = {t.group_id for t in _tasks([*range(20), *range(100, 105)])}
    _until(lambda: {g for g, n in _members(kafka).items() if n >= GROUP_SIZE} == wanted)
    assert service.stop() == 0
    outbox = Outbox(settings.run.folder / "outbox" / INSTANCE, settings.rollout.outbox_bytes)
    _assert_each_once(_received(kafka), outbox)
    assert outbox.num_trajectories == 25 * GROUP_SIZE


def test_a_stopped_service_sends_what_is_finished_and_fails_what_is_not(
    tmp_path: Path, kafka: Kafka, start: Callable[..., Service]
) -> None:
    settings = _prepare(tmp_path, kafka, drain_s=0.01)
    _send_tasks(kafka, range(30))
    service = start(settings)
    _until(lambda: bool(_received(kafka)))
    assert service.stop() == 0
    outbox = Outbox(settings.run.folder / "outbox" / INSTANCE, settings.rollout.outbox_bytes)
    messages = _received(kafka)
    _assert_each_once(messages, outbox)
    told = _usage(kafka)[-1]
    assert (told.outbox, told.produced_trajectories) == (outbox.id, outbox.num_trajectories)
    assert (told.produced_tokens, told.weight_version) == (outbox.num_tokens, 1)
    assert all(r.reward is None for m in messages for r in m.rows if r.stop_reason == "shutdown")


AGENT = """
import json, os, urllib.request
said = [{"role": "user", "content": "1+1"}]
for _ in range(2):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions")
    answer = json.load(urllib.request.urlopen(request, json.dumps({"messages": said, "max_tokens": 5}).encode()))
    said += [answer["choices"][0]["message"], {"role": "user", "content": "again"}]
print(json.loads(os.environ["LAGOON_TASK"])["index"] / 4)
"""


def test_agent_programs_are_groups_and_rows_like_any_other_episodes(
    tmp_path: Path, kafka: Kafka, start: Callable[..., Service]
) -> None:
    settings, options = _prepare(tmp_path, kafka), {"command": [sys.executable, "-c", AGENT]}
    tasks = [
        task(i, family="agents", index=i, group_size=GROUP_SIZE, environment="external", options=options)
        for i in range(3)
    ]
    _send(kafka, tasks)
    service = start(settings)
    _until(lambda: _members(kafka) == {t.group_id: GROUP_SIZE for t in tasks})
    assert service.stop() == 0
    messages = _received(kafka)
    _assert_each_once(messages, Outbox(settings.run.folder / "outbox" / INSTANCE, settings.rollout.outbox_bytes))
    for row in (r for m in messages for r in m.rows):
        assert (row.status, row.reward, row.error, row.rewards) == ("completed", int(row.task_id[-1]) / 4, None, ())
        assert [m["content"] for m in row.messages if m["role"] == "user"] == ["1+1", "again"]
        assert row.num_generated_tokens == sum(row.action_mask) == sum(t.action_end - t.action_start for t in row.turns)
        assert len(row.turns) == 2


def _assert_each_once(messages: list[Received], outbox: Outbox) -> None:
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


def _prepare(folder: Path, kafka: Kafka, drain_s: float = 10, create: bool = True) -> Settings:
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


def _tasks(draws: object) -> list[Task]:
    return [
        task(draw, index=draw, group_size=GROUP_SIZE, options={"kind": "add"})
        for draw in draws  # type: ignore[attr-defined]
    ]


def _send_tasks(kafka: Kafka, draws: object) -> None:
    _send(kafka, _tasks(draws))


def _send(kafka: Kafka, tasks: list[Task]) -> None:
    producer = Producer(kafka, "test")
    for one in tasks:
        producer.send(TASKS.name, one.group_id, one.to_bytes())
    producer.close()


def _received(kafka: Kafka) -> list[Received]:
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


def _members(kafka: Kafka) -> Counter[str]:
    """Members of each group in the topic, each counted once."""
    return Counter(group for group, _ in {(r.group_id, r.trajectory_id) for m in _received(kafka) for r in m.rows})


def _usage(kafka: Kafka) -> list[UsageInterval]:
    follower = Follower(kafka, USAGE.name, UsageInterval, "test")
    try:
        return follower.poll()
    finally:
        follower.close()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s"
        time.sleep(0.1)
