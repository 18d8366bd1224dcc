"""A producer that keeps order, repeats nothing, and hides no error."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock, local
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

    A client that can send no more (a broker has lost what it knew of it, for one: confluentinc/librdkafka#3584) is
    replaced: what it had not delivered fails for that reason, what comes later goes out.
    """

    def __init__(self, kafka: Kafka, client_id: str) -> None:
        self._kafka = kafka
        self._error: BrokerError | None = None
        self._draining = local()
        self._connect = partial(create, confluent_kafka.Producer, kafka, _settings(kafka, client_id))
        self._client, self._lock = self._connect(), Lock()

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
            BrokerError: the queue stayed full for `kafka.timeout_s`, or the message is too large.
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
        self._poll(self._client, 0)
        self._enqueue(message)

    def poll(self) -> None:
        """Serve delivery callbacks.

        Raises:
            BrokerError: the first delivery error that no callback took.
        """
        self._poll(self._client, 0)
        self._surface()

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent is delivered.

        Raises:
            BrokerError: something is still undelivered after `timeout_s`, or failed with no callback to take it.
        """
        undelivered = self._drain(self._client, timeout_s)
        self._surface()
        if undelivered:
            raise unanswered(self._kafka, f"{undelivered} messages undelivered after {timeout_s:g} s", "timed out")

    def close(self) -> None:
        """Flush for up to `kafka.timeout_s`, then give up what is left: its callbacks get an error.

        Raises:
            BrokerError: a message without a callback was not delivered.
        """
        try:
            self._drain(self._client, self._kafka.timeout_s)
        finally:
            self._client.purge()
            self._drain(self._client, 1)  # serves the callbacks of what was purged
        self._surface()

    def _poll(self, client: confluent_kafka.Producer, timeout_s: float) -> None:
        try:
            client.poll(timeout_s)
        except KafkaException as error:
            self._replace(client, "sending", error)

    def _drain(self, client: confluent_kafka.Producer, timeout_s: float) -> int:
        """Poll until nothing is undelivered, or for `timeout_s`; returns how much is.

        The client's own `flush` calls back for what is left while it raises, so that those calls fail.
        """
        deadline = time.monotonic() + timeout_s
        while len(client) and (left := deadline - time.monotonic()) > 0:
            self._poll(client, min(left, 0.1))
        return len(client)

    def _replace(self, client: confluent_kafka.Producer, action: str, error: KafkaException) -> None:
        """Go on with another client, if `error` is one that `client` cannot recover from."""
        fault = error.args[0]
        if not (fault.fatal() or fault.code() == KafkaError._FATAL):
            raise broker_error(self._kafka, action, error) from error
        with self._lock:
            if self._client is client:  # the first thread to notice
                log.error("%s: another client takes over, this one failed: %s", action, fault.str())
                self._client = self._connect()
        outer = self._fault
        self._draining.fault = fault  # while it is drained it tells more than that it failed
        client.purge()
        self._drain(client, 1)  # serves the callbacks of what was purged, and hears the fault again
        self._draining.fault = outer

    @property
    def _fault(self) -> KafkaError | None:
        """Of a client that this thread is draining; callbacks run in it."""
        return getattr(self._draining, "fault", None)

    def _enqueue(self, message: dict[str, Any]) -> None:
        deadline = time.monotonic() + self._kafka.timeout_s
        while True:
            client = self._client
            try:
                return client.produce(**message)
            except KafkaException as error:
                self._replace(client, f"sending {len(message['value'])} bytes to {message['topic']}", error)
            except BufferError:
                if time.monotonic() >= deadline:
                    raise BrokerError(
                        f"the send queue stayed full ({len(client)} messages) for {self._kafka.timeout_s:g} s; "
                        f"Kafka at {self._kafka.brokers} is away or slower than this producer"
                    ) from None
                self._poll(client, 0.05)

    def _delivered(self, on_delivery: OnDelivery | None, error: KafkaError | None, message: Message) -> None:
        failure = None
        if error is not None:
            topic = message.topic() or "?"
            failure = broker_error(self._kafka, f"delivering to {topic}", self._fault or error)
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
