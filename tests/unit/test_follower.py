"""Following a topic that grew long: nothing of it is held, nothing that was read is lost, its age is no fault."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, Message
from prometheus_client import REGISTRY

from infra.control import directives
from infra.kafka import Follower
from schemas.errors import BrokerError
from schemas.messages import BufferMessage, Directive, LearnerReport
from schemas.settings import Kafka
from tests.mock_broker import mock_broker

NOW = datetime(2026, 1, 1, tzinfo=UTC)
REFUSAL = Message(topic="control", error=KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))


@pytest.fixture
def kafka() -> Iterator[Kafka]:
    with mock_broker() as address:
        yield Kafka(brokers=address)


def produce(kafka: Kafka, topic: str, *messages: tuple[str, bytes]) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.brokers, "linger.ms": 20})
    for key, value in messages:
        producer.produce(topic, key=key, value=value, partition=0)
    assert producer.flush(30) == 0


def directive(number: int) -> bytes:
    return Directive(directive_id=f"d{number}", target="all", issued_by="test", issued_at=NOW).to_bytes()


def report(train_step: int) -> bytes:
    figures = {"weight_version": 1, "num_available": 0, "num_consumed": 0, "needs_per_step": 8}
    return LearnerReport(at=NOW, train_step=train_step, **figures).to_bytes()


def message(number: int) -> Message:
    return Message(topic="control", partition=0, offset=number, value=directive(number))


def follow(kafka: Kafka, num_messages: int, *reads: Sequence[Message]) -> Follower[Directive]:
    """Who follows a topic of so many messages, of which these come, read by read, and then no more."""
    produce(kafka, "control", *(("all", directive(n)) for n in range(num_messages)))
    follower, coming = Follower(kafka, "control", Directive, "test"), iter(reads)
    follower._consumer.close()
    follower._consumer = SimpleNamespace(consume=lambda *_: next(coming, []))  # type: ignore[assignment]
    return follower


def told(follower: Follower[Directive], fault: str) -> list[str]:
    """What a poll gives before it ends with `fault`."""
    names: list[str] = []
    with pytest.raises(BrokerError, match=fault):
        names.extend(said.directive_id for said in follower.poll())
    return names


def test_what_was_read_is_given_before_a_broker_that_sends_no_more_is_named(kafka: Kafka) -> None:
    follower = follow(kafka, 9, [message(0), message(1)], [message(2)])
    follower._kafka = kafka.model_copy(update={"timeout_s": 0.5})
    assert told(follower, r"was read to offset 3 of 9, then nothing came for 0\.5 s") == ["d0", "d1", "d2"]
    assert told(follower, "was read to offset 3 of 9") == []


def test_messages_that_came_together_with_a_refusal_are_given_before_it(kafka: Kafka) -> None:
    follower = follow(kafka, 2, [message(0), REFUSAL, message(1)])
    assert told(follower, "TOPIC_AUTHORIZATION_FAILED") == ["d0", "d1"]


def test_a_first_read_may_take_longer_than_the_timeout_while_messages_come(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("infra.kafka.follower.time", SimpleNamespace(monotonic=lambda: now[0]))
    follower = follow(kafka, 10, *([message(n)] for n in range(10)))
    for number, said in enumerate(follower.poll()):
        assert said.directive_id == f"d{number}"
        now[0] += kafka.timeout_s
    assert now == [10 * kafka.timeout_s]


def test_clock_messages_are_passed_over_undecoded(kafka: Kafka) -> None:
    produce(kafka, "control", *[("clock", b"not looked at")] * 50, ("all", directive(1)), ("clock", b"nor this"))
    follower = directives(kafka, "test")
    assert [d.directive_id for d in follower.poll()] == ["d1"]
    follower.close()
    assert not REGISTRY.get_sample_value("lagoon_undecodable_messages_total", {"topic": "control"})


def test_of_the_messages_of_one_key_only_the_newest_of_a_read_are_given(kafka: Kafka) -> None:
    produce(kafka, "buffer", *((f"learner{n % 2}", report(n)) for n in range(1000)))
    follower = Follower(kafka, "buffer", BufferMessage, "test", newest=True)
    steps = [said.root.train_step for said in follower.poll() if isinstance(said.root, LearnerReport)]
    follower.close()
    assert len(steps) < 1000
    assert set(steps[-2:]) == {998, 999}
