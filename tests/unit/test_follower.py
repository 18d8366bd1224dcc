"""Following a topic that grew long: nothing of it is held, nothing that was read is lost, its age is no fault."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from types import SimpleNamespace

import confluent_kafka
import pytest
from prometheus_client import REGISTRY

from infra.control import directives
from infra.kafka import Follower
from schemas.errors import BrokerError
from schemas.messages import BufferMessage, Directive, LearnerReport
from schemas.settings import Kafka
from tests.mock_broker import mock_broker

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ONE_AT_A_TIME = {"queued.min.messages": 1, "queued.max.messages.kbytes": 1, "fetch.message.max.bytes": 1000}


@pytest.fixture
def broker() -> Iterator[ExitStack]:
    """A mock broker that can be ended early."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def kafka(broker: ExitStack) -> Kafka:
    return Kafka(brokers=broker.enter_context(mock_broker()), client=ONE_AT_A_TIME)


def produce(kafka: Kafka, topic: str, *messages: tuple[str, bytes], each: bool = False) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.brokers, "linger.ms": 20})
    for key, value in messages:
        producer.produce(topic, key=key, value=value, partition=0)
        if each:
            producer.flush(30)  # a batch of its own
    assert producer.flush(30) == 0


def directive(number: int, reason: str = "") -> bytes:
    return Directive(directive_id=f"d{number}", target="all", issued_by="test", issued_at=NOW, reason=reason).to_bytes()


def report(train_step: int) -> bytes:
    figures = {"weight_version": 1, "num_available": 0, "num_consumed": 0, "needs_per_step": 8}
    return LearnerReport(at=NOW, train_step=train_step, **figures).to_bytes()


def test_what_was_read_is_given_before_a_broker_that_went_away_is_named(kafka: Kafka, broker: ExitStack) -> None:
    produce(kafka, "control", *(("all", directive(n, "x" * 4000)) for n in range(50)), each=True)
    follower = Follower(kafka.model_copy(update={"timeout_s": 1}), "control", Directive, "test")
    coming = (message.directive_id for message in follower.poll())
    heard = [next(coming)]
    broker.close()
    with pytest.raises(BrokerError, match=r"then nothing came for 1 s; Kafka at .* is away"):
        heard.extend(coming)
    with pytest.raises(BrokerError, match=f"was read to offset {len(heard)} of 50"):
        list(follower.poll())
    follower.close()
    assert 1 <= len(heard) < 50
    assert heard == [f"d{n}" for n in range(len(heard))]


def test_a_first_read_may_take_longer_than_the_timeout_while_messages_come(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("infra.kafka.follower.time", SimpleNamespace(monotonic=lambda: now[0]))
    produce(kafka, "control", *(("all", directive(n, "x" * 4000)) for n in range(10)), each=True)
    follower = Follower(kafka, "control", Directive, "test")
    for number, message in enumerate(follower.poll()):
        assert message.directive_id == f"d{number}"
        now[0] += kafka.timeout_s
    follower.close()
    assert now == [10 * kafka.timeout_s]


def test_clock_messages_are_passed_over_undecoded(kafka: Kafka) -> None:
    produce(kafka, "control", *[("clock", b"not looked at")] * 50, ("all", directive(1)), ("clock", b"nor this"))
    follower = directives(kafka, "test")
    assert [d.directive_id for d in follower.poll()] == ["d1"]
    follower.close()
    assert not REGISTRY.get_sample_value("lagoon_undecodable_messages_total", {"topic": "control"})


def test_of_the_messages_of_one_key_only_the_newest_of_a_batch_are_given(kafka: Kafka) -> None:
    follow = Kafka(brokers=kafka.brokers)
    produce(kafka, "buffer", *((f"learner{n % 2}", report(n)) for n in range(1000)))
    follower = Follower(follow, "buffer", BufferMessage, "test", newest=True)
    steps = [message.root.train_step for message in follower.poll() if isinstance(message.root, LearnerReport)]
    follower.close()
    assert len(steps) < 1000
    assert set(steps[-2:]) == {998, 999}
