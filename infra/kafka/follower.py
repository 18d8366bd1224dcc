"""Follow a single-partition topic, decoded: control, weights, buffer."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message, TopicPartition
from prometheus_client import Counter

from infra.kafka.client import UNKNOWN_TOPIC, broker_error, consumer, log
from schemas.errors import BrokerError, ContractError
from schemas.messages import M, decode
from schemas.settings import Kafka

UNDECODABLE = Counter(
    "lagoon_undecodable_messages", "Messages that break their schema, skipped by a follower", ["topic"]
)

_BATCH = 1000


class Follower(Generic[M]):
    """The messages of `topic` in order, each once; never part of a consumer group.

    From the beginning, the first `poll` gives all that the topic held when the follower was made; later ones give
    what is new, without waiting. Otherwise only what was written after the follower was made.
    """

    def __init__(
        self,
        kafka: Kafka,
        topic: str,
        type_: type[M],
        client_id: str,
        *,
        from_beginning: bool = True,
        without: str | None = None,
        newest: bool = False,
    ) -> None:
        """Messages with the key `without` are passed over, undecoded.

        With `newest`, so are those that another one with the same key was read together with, and superseded.
        """
        self._kafka, self._type = kafka, type_
        self._topic = kafka.topic(topic)
        self._without, self._newest = {without.encode()} if without else set[bytes](), newest
        self._consumer = consumer(kafka, client_id, **{"enable.partition.eof": True})
        start, self._end = self._bounds()
        self._next = start if from_beginning else self._end
        self._consumer.assign([TopicPartition(self._topic, 0, self._next)])

    def poll(self) -> Iterator[M]:
        """New messages, in order, each as it is read: a topic is as long as its retention lets it grow.

        Undecodable ones are logged and counted.

        Raises:
            BrokerError: the broker refuses, or during the first read nothing came for `kafka.timeout_s`; the next
                `poll` goes on behind what was given before.
        """
        yield from self._read(0)
        heard, before = time.monotonic(), self._next
        while self._next < self._end:
            yield from self._read(0.1)
            if self._next > before:
                heard, before = time.monotonic(), self._next
            elif time.monotonic() - heard >= self._kafka.timeout_s:
                raise BrokerError(
                    f"{self._topic} was read to offset {self._next} of {self._end}, then nothing came for "
                    f"{self._kafka.timeout_s:g} s; Kafka at {self._kafka.brokers} is away or slow"
                )

    def close(self) -> None:
        """Leave the broker."""
        self._consumer.close()

    def _bounds(self) -> tuple[int, int]:
        try:
            partition = TopicPartition(self._topic, 0)
            return self._consumer.get_watermark_offsets(partition, timeout=self._kafka.timeout_s)
        except KafkaException as error:
            fault = broker_error(self._kafka, f"following {self._topic}", self._said(error), self._consumer)
            self._consumer.close()
            raise fault from error

    def _said(self, error: KafkaException) -> KafkaError | KafkaException:
        """What the broker says of the topic, where the client only says that it does not know it."""
        if error.args[0].code() in UNKNOWN_TOPIC:
            with suppress(KafkaException):
                topics = self._consumer.list_topics(self._topic, timeout=self._kafka.timeout_s).topics
                return topics[self._topic].error or error
        return error

    def _read(self, timeout_s: float) -> Iterator[M]:
        came = self._consumer.consume(_BATCH, timeout_s)
        messages = [m for m in came if m.error() is None]
        last = {m.key(): m for m in messages} if self._newest else {}
        for message in messages:
            self._next = (message.offset() or 0) + 1
            key = message.key()
            if key not in self._without and last.get(key, message) is message:
                decoded = self._decode(message)
                yield from () if decoded is None else (decoded,)
        for message in came:  # only now: one may end this, and what came with it would not come again
            if (error := message.error()) is not None:
                self._handle(error, message)

    def _decode(self, message: Message) -> M | None:
        body = message.value()
        if body is None:  # a tombstone: compaction's mark that the key is gone
            return None
        try:
            return decode(self._type, body)
        except ContractError as error:
            UNDECODABLE.labels(self._topic).inc()
            log.warning("%s offset %s skipped: %s", self._topic, message.offset(), error)
            return None

    def _handle(self, error: KafkaError, message: Message) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            # transaction markers and compaction leave offsets without a message: the end is reached all the same
            self._next = max(self._next, message.offset() or 0)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            log.warning("%s: offset %s has expired; reading from the oldest that is left", self._topic, self._next)
            self._consumer.assign([TopicPartition(self._topic, 0, OFFSET_BEGINNING)])
        elif not error.retriable():
            raise broker_error(self._kafka, f"following {self._topic}", error)
