"""A producer that keeps order, repeats nothing, and hides no error."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Message
from prometheus_client import Counter

from infra.kafka.client import broker_error, client_settings, create, log, unanswered
from schemas.errors import BrokerError
from schemas.settings import Kafka

DELIVERY_FAILURES = Counter("lagoon_delivery_failures", "Messages that Kafka did not take", ["topic"])

OnDelivery = Callable[[BrokerError | None], None]


class Producer:
    """Idempotent, acknowledged by all replicas, compressed by batch; safe to share between threads.

    A message that is not acknowledged within `kafka.timeout_s` fails. Its error goes to the `on_delivery` that came
    with it; without one the next `poll`, `flush` or `close` raises it. Callbacks run inside `send` (those of earlier
    messages), `poll`, `flush` and `close`, in the calling thread.
    """

    def __init__(self, kafka: Kafka, client_id: str) -> None:
        self._kafka = kafka
        self._error: BrokerError | None = None
        self._client = create(confluent_kafka.Producer, kafka, _settings(kafka, client_id))

    def send(
        self,
        topic: str,
        key: str,
        value: bytes,
        *,
        headers: Mapping[str, bytes] | None = None,
        partition: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Queue a message for contract topic `topic`; returns at once unless the queue is full.

        Raises:
            BrokerError: the queue stayed full for `kafka.timeout_s`, the message is too large, or the client is broken.
        """
        message: dict[str, Any] = {
            "topic": self._kafka.topic(topic),
            "key": key.encode(),
            "value": value,
            "headers": {str(k): v for k, v in (headers or {}).items()},
            "on_delivery": partial(self._delivered, on_delivery),
        }
        if partition is not None:
            message["partition"] = partition
        self._serve(self._client.poll, 0)
        try:
            self._enqueue(message)
        except KafkaException as error:
            raise broker_error(self._kafka, f"sending {len(value)} bytes to {message['topic']}", error) from error

    def poll(self) -> None:
        """Serve delivery callbacks.

        Raises:
            BrokerError: the first delivery error that no callback took, or the broker takes nothing from this client.
        """
        self._serve(self._client.poll, 0)
        self._surface()

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent is delivered.

        Raises:
            BrokerError: something is still undelivered after `timeout_s`, or failed with no callback to take it.
        """
        undelivered = self._serve(self._client.flush, timeout_s)
        self._surface()
        if undelivered:
            raise unanswered(self._kafka, f"{undelivered} messages undelivered after {timeout_s:g} s", "timed out")

    def close(self) -> None:
        """Flush for up to `kafka.timeout_s`, then give up what is left: its callbacks get an error.

        Raises:
            BrokerError: a message without a callback was not delivered.
        """
        try:
            self._serve(self._client.flush, self._kafka.timeout_s)
        finally:
            self._client.purge()
            self._serve(self._client.flush, 1)  # serves the callbacks of what was purged
        self._surface()

    def _serve(self, call: Callable[[float], int], timeout_s: float) -> int:
        try:
            return call(timeout_s)
        except KafkaException as error:  # one that this client cannot recover from
            raise broker_error(self._kafka, "sending", error) from error

    def _enqueue(self, message: dict[str, Any]) -> None:
        deadline = time.monotonic() + self._kafka.timeout_s
        while True:
            try:
                return self._client.produce(**message)
            except BufferError:
                if time.monotonic() >= deadline:
                    raise BrokerError(
                        f"the send queue stayed full ({len(self._client)} messages) for {self._kafka.timeout_s:g} s; "
                        f"Kafka at {self._kafka.brokers} is away or slower than this producer"
                    ) from None
                self._client.poll(0.05)

    def _delivered(self, on_delivery: OnDelivery | None, error: KafkaError | None, message: Message) -> None:
        failure = None
        if error is not None:
            topic = message.topic() or "?"
            failure = broker_error(self._kafka, f"delivering to {topic}", error)
            DELIVERY_FAILURES.labels(topic).inc()
            log.error("%s", failure)
        if on_delivery is not None:
            on_delivery(failure)
        elif failure is not None:
            self._error = self._error or failure

    def _surface(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _settings(kafka: Kafka, client_id: str) -> dict[str, Any]:
    defaults = {
        "compression.type": "zstd",
        "linger.ms": 5,
        "delivery.timeout.ms": int(kafka.timeout_s * 1000),
        "message.max.bytes": kafka.max_message_bytes,
        "queue.buffering.max.kbytes": 256 * 1024,
        "topic.metadata.propagation.max.ms": 5000,  # a missing topic is named before messages to it time out
    }
    return defaults | client_settings(kafka, client_id) | {"enable.idempotence": True, "acks": "all"}
