"""Kafka clients against a real broker: topics, delivery, following, and a broker that is killed."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from prometheus_client import REGISTRY

from infra.kafka import Follower, Producer, client_settings, consumer, ensure_topics, topic_differences
from infra.stack.kafka import LocalKafka
from infra.stack.ports import free_port
from schemas.errors import BrokerError
from schemas.messages import Directive, WeightSummary
from schemas.settings import Kafka
from schemas.topics import TOPICS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.kafka


def _admin(kafka: Kafka) -> AdminClient:
    return AdminClient(client_settings(kafka, "test-admin"))


def _directive(name: str, reason: str = "") -> bytes:
    now = datetime.now(UTC)
    return Directive(directive_id=name, target="all", issued_by="test", issued_at=now, reason=reason).to_bytes()


def _read(kafka: Kafka, topic: str, partition: int, num_messages: int) -> list[confluent_kafka.Message]:
    reader = consumer(kafka, "test-reader")
    reader.assign([TopicPartition(kafka.topic(topic), partition, 0)])
    messages = reader.consume(num_messages, 20)
    reader.close()
    return messages


def _end(kafka: Kafka, topic: str) -> int:
    reader = consumer(kafka, "test-reader")
    _, end = reader.get_watermark_offsets(TopicPartition(kafka.topic(topic), 0), timeout=20)
    reader.close()
    return end


def _result(futures: dict[Any, Future[Any]]) -> Any:
    return next(iter(futures.values())).result(20)


def _delete_records(kafka: Kafka, topic: str, before: int) -> None:
    admin = _admin(kafka)  # held: a client that is collected never resolves its futures
    _result(admin.delete_records([TopicPartition(kafka.topic(topic), 0, before)]))


def _until(condition: Callable[[], bool], step: Callable[[], object] = lambda: None) -> None:
    for _ in range(2400):
        if condition():
            return
        step()
        threading.Event().wait(0.05)
    raise AssertionError("the condition did not come true in 120 s")


def test_missing_topics_are_named_then_created_as_declared(kafka: Kafka) -> None:
    assert [d.partition(" ")[0] for d in topic_differences(kafka)] == [
        kafka.topic(name) for name in ("tasks", "buffer", "trajectories", "weights", "evals", "control", "usage")
    ]
    ensure_topics(kafka)
    assert topic_differences(kafka) == []
    admin = _admin(kafka)
    topics = admin.list_topics(timeout=10).topics
    assert {n: len(topics[kafka.topic(n)].partitions) for n in ("tasks", "trajectories", "control", "weights")} == {
        "tasks": 1,
        "trajectories": 4,
        "control": 1,
        "weights": 1,
    }
    resource = ConfigResource(ResourceType.TOPIC, kafka.topic("evals"))
    config = _result(admin.describe_configs([resource]))
    assert set(config["cleanup.policy"].value.split(",")) == {"compact", "delete"}
    assert config["message.timestamp.type"].value == "LogAppendTime"


def test_two_processes_may_create_the_topics_at_once(kafka: Kafka) -> None:
    faults: list[BrokerError] = []

    def create() -> None:
        try:
            ensure_topics(kafka)
        except BrokerError as error:
            faults.append(error)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_another_partition_count_is_named_with_its_mend(kafka: Kafka) -> None:
    ensure_topics(kafka)
    other = kafka.model_copy(update={"partitions": 8})
    with pytest.raises(
        BrokerError, match=r"trajectories has 4 partitions, expected 8; set kafka\.partitions = 4"
    ) as raised:
        ensure_topics(other)
    assert str(raised.value).count("\n- ") == 1


def test_a_control_topic_with_two_partitions_is_refused(kafka: Kafka) -> None:
    admin = _admin(kafka)
    _result(admin.create_topics([NewTopic(kafka.topic("control"), 2, 1)]))
    with pytest.raises(BrokerError, match=r"control has 2 partitions, expected 1; delete the topic"):
        ensure_topics(kafka)


def test_another_setting_is_named_and_the_named_mend_mends_it(kafka: Kafka) -> None:
    ensure_topics(kafka)
    admin, name = _admin(kafka), kafka.topic("usage")

    def alter(value: str) -> None:
        entry = ConfigEntry("retention.ms", value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=[entry])
        _result(admin.incremental_alter_configs([resource]))

    alter("1000")
    _until(lambda: topic_differences(kafka) != [])
    with pytest.raises(BrokerError) as raised:
        ensure_topics(kafka)
    assert f"{name} has retention.ms = 1000 (expected 604800000)" in str(raised.value)
    assert f"--entity-name {name} --add-config 'retention.ms=[604800000]'" in str(raised.value)
    alter("604800000")
    _until(lambda: topic_differences(kafka) == [])


def test_topics_that_keep_batches_compressed_are_named_with_the_setting_that_lets_them(kafka: Kafka) -> None:
    kept = kafka.model_copy(update={"compression": "producer"})
    ensure_topics(kept)
    assert topic_differences(kept) == []
    found = topic_differences(kafka)
    assert [d.endswith('; or set kafka.compression = "producer"') for d in found] == [True] * len(TOPICS)


def test_more_replicas_than_brokers_is_an_error_that_names_the_setting(kafka: Kafka) -> None:
    with pytest.raises(BrokerError, match=r"kafka\.replication = 3"):
        ensure_topics(kafka.model_copy(update={"replication": 3}))


def test_a_message_arrives_with_key_headers_and_partition(kafka: Kafka) -> None:
    ensure_topics(kafka)
    producer, outcomes = Producer(kafka, "test"), []
    headers = {"lagoon-rows": b"16", "lagoon-outbox": b"o-1"}
    producer.send("trajectories", "g-1", b"body", headers=headers, partition=3, on_delivery=outcomes.append)
    producer.close()
    (message,) = _read(kafka, "trajectories", 3, 1)
    assert (message.key(), message.value(), dict(message.headers() or [])) == (b"g-1", b"body", headers)
    assert message.timestamp()[0] == confluent_kafka.TIMESTAMP_LOG_APPEND_TIME
    assert outcomes == [None]


@pytest.mark.parametrize(("compression", "answer"), [("uncompressed", "MSG_SIZE_TOO_LARGE"), ("producer", None)])
def test_no_topic_takes_a_batch_that_unfolds_to_more_than_a_message_may_have_unless_writers_are_trusted(
    kafka: Kafka, compression: str, answer: str | None
) -> None:
    small = kafka.model_copy(update={"max_message_bytes": 100_000, "compression": compression})
    ensure_topics(small)
    other = {"bootstrap.servers": kafka.brokers, "compression.type": "zstd", "message.max.bytes": 10_000_000}
    producer = confluent_kafka.Producer(other)
    for num_bytes, expected in ((90_000, None), (5_000_000, answer)):  # of zeros zstd makes a few hundred
        answers: list[str | None] = []
        for topic in TOPICS:
            note = lambda error, _: answers.append(error and error.name())  # noqa: B023, E731
            producer.produce(small.topic(topic), bytes(num_bytes), key=b"k", on_delivery=note)
        producer.flush(30)
        assert answers == [expected] * len(TOPICS)


def test_a_topic_that_does_not_exist_is_named(kafka: Kafka) -> None:
    producer = Producer(kafka, "test")
    producer.send("usage", "a", b"x")
    with pytest.raises(BrokerError, match=rf"{kafka.topic('usage')}.*lagoon up"):
        producer.flush(30)
    producer.close()


def test_a_full_queue_empties_itself_and_loses_nothing(kafka: Kafka) -> None:
    small = kafka.model_copy(update={"client": {"queue.buffering.max.messages": 10}})
    ensure_topics(small)
    producer = Producer(small, "test")
    for i in range(500):
        producer.send("usage", "a", str(i).encode())
    producer.close()
    assert [m.value() for m in _read(kafka, "usage", 0, 500)] == [str(i).encode() for i in range(500)]


def test_a_consumer_whose_offset_has_expired_stops_instead_of_jumping(kafka: Kafka) -> None:
    ensure_topics(kafka)
    producer = Producer(kafka, "test")
    for i in range(10):
        producer.send("usage", "a", str(i).encode())
    producer.close()
    _delete_records(kafka, "usage", 5)
    reader = consumer(kafka, "test-reader")
    reader.assign([TopicPartition(kafka.topic("usage"), 0, 1)])
    message = reader.poll(20)
    reader.close()
    assert message is not None
    assert message.error() is not None
    assert message.error().code() == KafkaError._AUTO_OFFSET_RESET


def test_a_consumer_of_one_partition_commits_nothing(kafka: Kafka) -> None:
    ensure_topics(kafka)
    producer = Producer(kafka, "test")
    producer.send("usage", "a", b"x")
    producer.close()
    assert len(_read(kafka, "usage", 0, 1)) == 1
    reader = consumer(kafka, "test-reader")
    (committed,) = reader.committed([TopicPartition(kafka.topic("usage"), 0)], timeout=60)
    reader.close()
    assert committed.offset == confluent_kafka.OFFSET_INVALID


def _names(directives: Iterable[Directive]) -> list[str]:
    return [d.directive_id for d in directives]


def _poll_until(follower: Follower[Directive], num_messages: int) -> list[str]:
    found: list[str] = []
    _until(lambda: len(found) >= num_messages, lambda: found.extend(_names(follower.poll())))
    return found


def test_the_first_poll_returns_all_there_is_and_later_ones_what_is_new(kafka: Kafka) -> None:
    ensure_topics(kafka)
    producer = Producer(kafka, "test")
    for i in range(3):
        producer.send("control", "all", _directive(f"d{i}"))
    producer.flush(10)
    follower = Follower(kafka, "control", Directive, "test")
    late = Follower(kafka, "control", Directive, "test", from_beginning=False)
    assert _names(follower.poll()) == ["d0", "d1", "d2"]
    assert list(late.poll()) == []
    producer.send("control", "all", _directive("d3"))
    producer.close()
    assert _poll_until(follower, 1) == ["d3"]
    assert _poll_until(late, 1) == ["d3"]
    follower.close()
    late.close()


def test_what_cannot_be_decoded_is_counted_and_the_rest_goes_on(kafka: Kafka) -> None:
    ensure_topics(kafka)
    producer = Producer(kafka, "test")
    for body in (_directive("d0"), b"junk", b'{"directive_id": "x"}', b"", _directive("d1")):
        producer.send("control", "all", body)
    producer.close()
    follower = Follower(kafka, "control", Directive, "test")
    assert _names(follower.poll()) == ["d0", "d1"]
    follower.close()
    labels = {"topic": kafka.topic("control")}
    assert REGISTRY.get_sample_value("lagoon_undecodable_messages_total", labels) == 3


def test_a_tombstone_is_no_message(kafka: Kafka) -> None:
    ensure_topics(kafka)
    raw = confluent_kafka.Producer(client_settings(kafka, "test"))
    raw.produce(kafka.topic("control"), key=b"all", value=None)
    raw.flush(10)
    follower = Follower(kafka, "control", Directive, "test")
    assert list(follower.poll()) == []
    follower.close()
    assert REGISTRY.get_sample_value("lagoon_undecodable_messages_total", {"topic": kafka.topic("control")}) is None


def test_transaction_markers_at_the_end_keep_no_follower_waiting(kafka: Kafka) -> None:
    ensure_topics(kafka)
    settings = client_settings(kafka, "test") | {"transactional.id": kafka.topic("tx")}
    raw = confluent_kafka.Producer(settings)
    raw.init_transactions(30)
    for name, end in (("d0", raw.commit_transaction), ("d1", raw.abort_transaction)):
        raw.begin_transaction()
        raw.produce(kafka.topic("control"), key=b"all", value=_directive(name))
        raw.flush(10)
        end(30)
    confluent_kafka.Producer(settings).init_transactions(30)  # the last marker is written after its call returns
    follower = Follower(kafka, "control", Directive, "test")
    assert _names(follower.poll()) == ["d0"]  # read_committed: the aborted one is none
    assert list(follower.poll()) == []
    follower.close()


def test_a_follower_goes_on_from_the_oldest_message_left(kafka: Kafka) -> None:
    one_at_a_time = {"queued.min.messages": 1, "queued.max.messages.kbytes": 1, "fetch.message.max.bytes": 1000}
    ensure_topics(kafka)
    producer = Producer(kafka, "test")
    for i in range(10):
        producer.send("usage", "all", _directive(f"d{i}", os.urandom(2000).hex()))
        producer.flush(10)  # a batch of its own
    producer.close()
    follower = Follower(kafka.model_copy(update={"client": one_at_a_time}), "usage", Directive, "test")
    _delete_records(kafka, "usage", 8)
    names = _names(follower.poll())
    follower.close()
    assert "d5" not in names
    assert names[-2:] == ["d8", "d9"]


def test_following_a_missing_topic_says_what_creates_it(kafka: Kafka) -> None:
    with pytest.raises(BrokerError, match="lagoon up"):
        Follower(kafka, "weights", WeightSummary, "test")


class _Broker:
    """A broker of the test's own, to be killed and started again on the same data."""

    def __init__(self, folder: Path) -> None:
        self._local = LocalKafka(ROOT / ".lagoon" / "kafka", folder / "data", free_port(), free_port())
        self._log = open(folder / "kafka.log", "wb")  # noqa: SIM115 - closed with the broker
        self.address = self._local.address
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._local.prepare(), stdout=self._log, stderr=self._log)
        _until(self._answers)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the broker ended while it started"
        try:
            return bool(_admin(Kafka(brokers=self.address)).list_topics(timeout=1).brokers)
        except confluent_kafka.KafkaException:
            return False

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[_Broker]:
    broker = _Broker(tmp_path)
    yield broker
    broker.kill()


def _send_all(producer: Producer, bodies: list[bytes], outcomes: list[BrokerError | None]) -> None:
    for body in bodies:
        producer.send("usage", "a", body, on_delivery=outcomes.append)


@pytest.mark.slow
def test_a_broker_killed_while_it_is_sent_to_costs_nothing_and_repeats_nothing(mortal: _Broker) -> None:
    kafka = Kafka(brokers=mortal.address, timeout_s=200)
    ensure_topics(kafka)
    producer, outcomes = Producer(kafka, "test"), []
    bodies = [str(i).encode() for i in range(3000)]
    _send_all(producer, bodies[:1000], outcomes)
    _until(lambda: len(outcomes) > 0, producer.poll)
    _send_all(producer, bodies[1000:1500], outcomes)
    mortal.freeze()
    _send_all(producer, bodies[1500:2000], outcomes)
    mortal.kill()
    assert len(outcomes) <= 1500  # the others are in flight
    _send_all(producer, bodies[2000:], outcomes)
    mortal.start()
    producer.close()
    assert outcomes == [None] * 3000
    assert [m.value() for m in _read(kafka, "usage", 0, 3000)] == bodies
    assert _end(kafka, "usage") == 3000


@pytest.mark.slow
def test_after_an_outage_longer_than_the_timeout_the_same_producer_and_follower_go_on(mortal: _Broker) -> None:
    kafka = Kafka(brokers=mortal.address)
    ensure_topics(kafka)
    producer, outcomes = Producer(kafka.model_copy(update={"timeout_s": 2}), "test"), []
    _until(lambda: None in outcomes, lambda: _send_one(producer, "before", outcomes))
    producer.flush(20)
    follower = Follower(kafka, "control", Directive, "test")
    assert set(_names(follower.poll())) == {"before"}
    mortal.kill()
    outcomes.clear()
    producer.send("control", "all", _directive("lost"), on_delivery=outcomes.append)
    _until(lambda: len(outcomes) == 1, producer.poll)
    assert isinstance(outcomes[0], BrokerError)
    assert list(follower.poll()) == []
    mortal.start()
    _until(lambda: outcomes[-1] is None, lambda: _send_one(producer, "after", outcomes))
    assert _poll_until(follower, 1)[0] == "after"
    follower.close()
    producer.close()


def _send_one(producer: Producer, name: str, outcomes: list[BrokerError | None]) -> None:
    producer.send("control", "all", _directive(name), on_delivery=outcomes.append)
    producer.poll()
