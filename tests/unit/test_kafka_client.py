"""Kafka clients without a broker: settings, secrets, and errors that surface."""

import ctypes
import gc
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event
from types import NoneType

import pytest
from confluent_kafka import KafkaError, KafkaException, cimpl
from confluent_kafka.admin import AdminClient

from flows.connectors.ends import EndOffsets
from inference.tasks import ShareGroupTasks
from infra.kafka import Follower, Producer, access, client_settings, consumer, ensure_topics, topic_differences
from infra.stack.ports import free_port
from schemas.errors import BrokerError, SettingsError
from schemas.messages import Directive
from schemas.settings import Kafka
from tests.mock_broker import mock_broker

SECRET = "hunter2-and-more"


@pytest.fixture
def nowhere() -> Kafka:
    """Settings for an address where nothing listens."""
    return Kafka(brokers=f"127.0.0.1:{free_port()}", timeout_s=0.3)


def test_without_an_address_the_error_names_the_setting() -> None:
    with pytest.raises(SettingsError, match=r"kafka\.brokers is empty"):
        client_settings(Kafka(), "test")


def test_a_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", SECRET)
    kafka = Kafka(brokers="k:9092", client={"sasl.username": "u"}, secrets={"sasl.password": "KAFKA_PASSWORD"})
    settings = client_settings(kafka, "test")
    assert (settings["sasl.username"], settings["sasl.password"]) == ("u", SECRET)


def test_a_missing_secret_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_PASSWORD", raising=False)
    with pytest.raises(SettingsError, match="KAFKA_PASSWORD"):
        client_settings(Kafka(brokers="k:9092", secrets={"sasl.password": "KAFKA_PASSWORD"}), "test")


def test_a_secret_that_librdkafka_refuses_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_MECHANISM", SECRET)
    kafka = Kafka(brokers="k:9092", secrets={"security.protocol": "KAFKA_MECHANISM"})
    with pytest.raises(SettingsError, match=r"security\.protocol") as raised:
        Producer(kafka, "test")
    assert SECRET not in str(raised.value)
    assert raised.value.__context__ is None  # so that no traceback shows it either


def test_an_unknown_client_setting_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"no\.such\.setting"):
        consumer(Kafka(brokers="k:9092", client={"no.such.setting": 1}), "test")


def test_what_the_producer_promises_cannot_be_set_away() -> None:
    with pytest.raises(ValueError, match=r"enable\.idempotence"):
        Kafka(brokers="k:9092", client={"enable.idempotence": False})


def test_an_unreachable_broker_is_one_error_with_its_address_and_a_mend(nowhere: Kafka) -> None:
    for attempt in (
        lambda: ensure_topics(nowhere, 0.3),
        lambda: topic_differences(nowhere),
        lambda: Follower(nowhere, "control", Directive, "test"),
    ):
        with pytest.raises(BrokerError, match=rf"{nowhere.brokers}.*lagoon up"):
            attempt()


def test_no_client_with_a_thread_is_left_to_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run in that very thread, and then librdkafka aborts the process."""
    monkeypatch.setattr("inference.tasks._JOIN_S", 0.2)
    kafka = Kafka(brokers=f"127.0.0.1:{free_port()}", timeout_s=0.3)
    gc.collect()
    gc.disable()
    try:
        before = {id(client) for client in clients()}
        with pytest.raises(BrokerError):
            access.grant(kafka, access.ROLES["rollout"], "User:me")
        tasks = ShareGroupTasks(kafka, "test", lambda *_, **__: None)
        assert tasks.next(1) == []
        ends = EndOffsets(kafka.model_copy(update={"timeout_s": 1.0}), "test", "test", [("weights", 0)], 0.0)
        with pytest.raises(BrokerError, match="asking for end offsets"):
            poll_for_ever(ends)
        del ends
        assert [client for client in clients() if id(client) not in before and is_open(client)] == []
    finally:
        gc.enable()


def poll_for_ever(ends: EndOffsets) -> None:
    while True:
        ends.poll()
        time.sleep(0.01)


def clients() -> list[AdminClient]:
    return [found for found in gc.get_objects() if isinstance(found, AdminClient)]


def is_open(client: AdminClient) -> bool:
    try:
        client.poll(0)
    except RuntimeError:
        return False
    return True


def test_a_delivery_error_goes_to_its_callback_and_nowhere_else(nowhere: Kafka) -> None:
    producer, outcomes = Producer(nowhere, "test"), []
    producer.send("usage", "a", b"x", on_delivery=outcomes.append)
    producer.close()
    assert [type(o) for o in outcomes] == [BrokerError]
    assert nowhere.brokers in str(outcomes[0])


def test_a_delivery_error_without_callback_is_raised_once(nowhere: Kafka) -> None:
    producer = Producer(nowhere, "test")
    producer.send("usage", "a", b"x")
    with pytest.raises(BrokerError, match="usage"):
        producer.flush(30)
    producer.poll()
    producer.close()


def test_flush_says_how_much_is_undelivered() -> None:
    producer = Producer(Kafka(brokers=f"127.0.0.1:{free_port()}", timeout_s=5), "test")
    producer.send("usage", "a", b"x")
    producer.send("usage", "b", b"y")
    with pytest.raises(BrokerError, match=r"2 messages undelivered after 0\.05 s"):
        producer.flush(0.05)


def test_a_full_queue_is_an_error_after_the_timeout() -> None:
    client = {"queue.buffering.max.messages": 1, "delivery.timeout.ms": 60_000}
    producer = Producer(Kafka(brokers=f"127.0.0.1:{free_port()}", timeout_s=0.2, client=client), "test")
    outcomes: list[BrokerError | None] = []
    producer.send("usage", "a", b"x", on_delivery=outcomes.append)
    with pytest.raises(BrokerError, match="stayed full"):
        producer.send("usage", "b", b"y")
    producer.close()
    assert [type(o) for o in outcomes] == [BrokerError]  # what close lets go of is told as well


def test_a_message_above_the_limit_is_refused_at_once() -> None:
    producer = Producer(Kafka(brokers="127.0.0.1:1", max_message_bytes=1024, timeout_s=0.1), "test")
    with pytest.raises(BrokerError, match="sending 2000 bytes to usage"):
        producer.send("usage", "a", b"x" * 2000)


@pytest.mark.parametrize("notice", ["send", "produce", "poll", "flush"])
def test_a_client_that_can_send_no_more_is_replaced_and_what_it_had_fails(notice: str) -> None:
    client = {"linger.ms": 20_000, "batch.size": 1000}  # a message of this size goes at once, a smaller one waits
    with mock_broker() as address:
        producer = Producer(Kafka(brokers=address, client=client), "test")
        outcomes: list[tuple[bytes, BrokerError | None]] = []

        def send(body: bytes) -> None:
            producer.send("usage", "a", body, partition=0, on_delivery=lambda error: outcomes.append((body, error)))

        before, under_way, after = b"b" * 1000, b"u", b"a" * 1000
        send(before)
        producer.flush(30)
        send(under_way)
        break_for_good(producer)
        if notice == "produce":  # it broke after `send` had polled

            def look_away(*_: object) -> None:
                del producer._poll

            producer._poll = look_away
        elif notice != "send":
            producer.poll() if notice == "poll" else producer.flush(30)
            assert [body for body, _ in outcomes] == [before, under_way]
        send(after)
        producer.close()
    assert [(body, type(error)) for body, error in outcomes] == [
        (before, NoneType),
        (under_way, BrokerError),
        (after, NoneType),
    ]
    assert "answers OUT_OF_ORDER_SEQUENCE_NUMBER" in str(outcomes[1][1])


def test_threads_that_replace_a_client_at_once_leave_none_of_its_faults_behind(nowhere: Kafka) -> None:
    producer, drain = Producer(nowhere, "test"), Producer._drain
    second, broken = Event(), KafkaException(KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, fatal=True))
    replace = lambda: producer._replace(producer._client, "sending", broken)  # noqa: E731
    with ThreadPoolExecutor() as pool:

        def first_drains(*_: object) -> int:
            producer._drain = second_drains
            later.append(pool.submit(replace))
            return not second.wait(30)

        def second_drains(*_: object) -> int:
            second.set()
            first.result(30)
            return 0

        later: list[Future[None]] = []
        producer._drain = first_drains
        first = pool.submit(replace)
        first.result(30)
        later[0].result(30)
    producer._drain = partial(drain, producer)
    producer.send("usage", "a", b"x")
    with pytest.raises(BrokerError, match="no answer from Kafka"):
        producer.flush(30)


def break_for_good(producer: Producer) -> None:
    """As when a broker has lost what it knew of the producer; librdkafka's own function for tests."""
    client = ctypes.c_void_p.from_address(id(producer._client) + object.__basicsize__)  # its first field
    out_of_order = KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert ctypes.CDLL(cimpl.__file__).rd_kafka_test_fatal_error(client, out_of_order, b"by the test") == 0


def test_the_same_complaint_of_the_client_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("lagoon.kafka")
    with caplog.at_level(logging.WARNING, "lagoon.kafka"):
        for _ in range(3):
            log.warning("Connection refused by 127.0.0.1:1")
    assert len(caplog.records) == 1
