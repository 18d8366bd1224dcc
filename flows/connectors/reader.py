"""Reads partitions of a log: never jumps over offsets, ends where it cannot go on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as Place

from flows.connectors.items import Hole, Raw
from flows.connectors.pulse import log
from infra.kafka import consumer
from schemas.errors import BrokerError
from schemas.settings import Kafka

_PASSING = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._WAIT_COORD,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REQUEST_TIMED_OUT,
    }
)
"""Errors that a restart of the broker causes."""

_QUEUE = {
    "enable.partition.eof": True,
    "queued.max.messages.kbytes": 16 * 1024,
    "fetch.wait.max.ms": 500,
    "fetch.error.backoff.ms": 100,
}


_HEADERS: Callable[[Message], Sequence[tuple[str, Any]] | None] = methodcaller("headers")


@dataclass(frozen=True, slots=True)
class End:
    """Everything below `offset` has been read."""

    topic: str
    offset: int


class Reader:
    """Reads one partition of each topic in `places` (contract name -> (partition, next offset or None)).

    `part` names it in logs and errors. None reads from the oldest message on. With `skip_expired` expired offsets
    become a `Hole`.
    """

    def __init__(
        self, kafka: Kafka, client_id: str, part: str, places: Mapping[str, tuple[int, int | None]], skip_expired: bool
    ) -> None:
        self._kafka, self._part, self._skip_expired = kafka, part, skip_expired
        self._names = {kafka.topic(topic): topic for topic in places}
        self._partitions = {topic: partition for topic, (partition, _) in places.items()}
        self._next = {topic: offset for topic, (_, offset) in places.items()}
        self._noted = [dict(self._next)] * 2
        self._paused: set[str] = set()
        self._moved = False
        self._consumer = consumer(kafka, client_id, **_QUEUE)
        self._assign()

    def read(self, max_messages: int) -> list[Raw | Hole | End]:
        """What has come, in offset order for each topic, without waiting.

        Raises:
            BrokerError: offsets that have expired or are beyond the log's end, or an error that will not pass. A broker
                that is away is no error here: `EndOffsets` sees to that.
        """
        messages = self._consumer.consume(max_messages, 0)
        found = [item for message in messages if (item := self._item(message)) is not None]
        if self._moved:
            self._assign()
        return found

    def pause(self, topic: str, paused: bool) -> None:
        """Stop or go on reading `topic`; harmless when repeated."""
        if paused != (topic in self._paused):
            (self._consumer.pause if paused else self._consumer.resume)([self._place(topic)])
            (self._paused.add if paused else self._paused.remove)(topic)

    def position(self, topic: str) -> int:
        """Everything below this offset of `topic` has been read; 0 before the first message of a new reader."""
        return self._next[topic] or 0

    def check_ends(self, ends: Mapping[str, int]) -> None:
        """Compare a new round of end offsets with what had been read before that round was asked for.

        Raises:
            BrokerError: messages that had been read are not there any more; the broker was asked once more.
        """
        # two rounds ago this one was not yet asked for; one round ago it may have been
        before, self._noted = self._noted[0], [self._noted[1], dict(self._next)]
        for topic, end in ends.items():
            position = before[topic]
            if position is not None and end < position:
                self._refuse_loss(topic, position)

    def close(self) -> None:
        """Leave the broker."""
        self._consumer.close()

    def _assign(self) -> None:
        """Read every topic on from where it has been read to; a seek is refused where offsets are out of range."""
        self._consumer.assign([self._place(topic) for topic in self._partitions])
        self._paused.clear()
        self._moved = False

    def _place(self, topic: str) -> Place:
        offset = self._next[topic]
        start = OFFSET_BEGINNING if offset is None else offset
        return Place(self._kafka.topic(topic), self._partitions[topic], start)

    def _item(self, message: Message) -> Raw | Hole | End | None:
        error = message.error()
        if error is not None:
            return self._handle(error, self._names.get(message.topic() or ""), message.offset())
        raw = _raw(self._names[message.topic() or ""], message)
        self._next[raw.topic] = raw.next_offset
        return raw

    def _handle(self, error: KafkaError, topic: str | None, offset: int | None) -> Hole | End | None:
        if error.code() == KafkaError._PARTITION_EOF and topic is not None and offset is not None:
            self._next[topic] = max(self._next[topic] or 0, offset)
            return End(topic, offset)
        if error.code() == KafkaError._AUTO_OFFSET_RESET and topic is not None:
            return self._out_of_range(topic)
        if error.fatal() or not (error.retriable() or error.code() in _PASSING):
            raise BrokerError(f"{self._part}: Kafka at {self._kafka.brokers} answers {error.name()}: {error.str()}")
        log.warning("%s: %s; reading goes on when it has passed", self._part, error.str())
        return None

    def _out_of_range(self, topic: str) -> Hole | None:
        """The log does not hold the offset that was asked for: it has expired, or was never written there."""
        bounds = self._bounds(topic)
        if bounds is None:
            return None
        low, high = bounds
        self._moved = True
        position = self._next[topic]
        if position is not None and high < position:
            self._refuse_loss(topic, position)
        if position is None or position >= low:
            return None
        return self._skip(topic, position, low)

    def _skip(self, topic: str, start: int, end: int) -> Hole:
        partition = self._partitions[topic]
        hole = f"offsets [{start},{end}) of {topic}/{partition}"
        if not self._skip_expired:
            raise BrokerError(
                f"{self._part}: {hole} have expired before they were read; {end - start} messages are lost. To go on "
                f"from {end}, with a row in dead_letters for the hole, set curate.skip_expired_offsets = true; to keep "
                "messages longer, raise kafka.retention_h"
            )
        self._next[topic] = end
        return Hole(topic, partition, start, end, 0)

    def _refuse_loss(self, topic: str, position: int) -> None:
        bounds = self._bounds(topic)
        if bounds is not None and bounds[1] < position:
            raise BrokerError(
                f"{self._part}: {topic}/{self._partitions[topic]} ends at offset {bounds[1]}, but had been read up to "
                f"{position}: the broker was emptied, restored or replaced. Restore its data; or, to begin a new "
                "history, start a new run (run.name) with an empty lake"
            )

    def _bounds(self, topic: str) -> tuple[int, int] | None:
        """Oldest and end offset of the log, or None where the broker does not say. Takes as long as a fetch waits."""
        try:
            return self._consumer.get_watermark_offsets(self._place(topic), timeout=5)
        except KafkaException as error:
            log.warning("%s: no offsets of %s: %s", self._part, topic, error.args[0].str())
            return None


def _raw(topic: str, message: Message) -> Raw:
    kind, timestamp = message.timestamp()
    if kind != TIMESTAMP_LOG_APPEND_TIME:
        raise BrokerError(
            f"{message.topic()} does not carry the broker's time; set message.timestamp.type=LogAppendTime on it, or "
            "delete it and let `lagoon up` create it"
        )
    return Raw(
        topic,
        message.partition() or 0,
        message.offset() or 0,
        timestamp,
        message.key(),
        headers_of(message),
        message.value() or b"",
    )


def headers_of(message: Message) -> tuple[tuple[str, bytes], ...]:
    """The headers of `message`; none where one has a name that is not UTF-8, for which the client has no text.

    Ask once for each message: to a second question the client answers with what is left of the first. It answers and
    raises at once, which Python's own calls notice late where they are hot, and those of `methodcaller` in time.
    """
    try:
        headers = _HEADERS(message) or ()
    except (SystemError, UnicodeDecodeError):
        return ()
    return tuple((name, value or b"") for name, value in headers)
