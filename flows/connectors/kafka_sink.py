"""Messages to a topic, at least once: they are delivered before the epoch that made them becomes durable."""

import bytewax.operators as op
from bytewax.operators import KeyedStream
from bytewax.outputs import FixedPartitionedSink, StatefulSinkPartition

from infra.kafka import Producer
from schemas.messages import Message
from schemas.settings import Kafka

Outgoing = tuple[str, Message | bytes]
"""A message's key and value."""

_PART = "p000"


class KafkaSink(FixedPartitionedSink[Outgoing, None]):
    """Messages to the contract topic `topic`. Items: (routing key, (key, Message | bytes)); see `kafka_output`.

    Bytewax hands a sink the values only, so the message's key is part of the value. One partition, and so one
    producer: messages keep their order. After a crash those of the last epoch come again.
    """

    def __init__(self, kafka: Kafka, topic: str, client_id: str) -> None:
        self._kafka, self._topic, self._client_id = kafka, topic, client_id

    def list_parts(self) -> list[str]:
        """One."""
        return [_PART]

    def build_part(self, step_id: str, for_part: str, resume_state: None) -> "KafkaPart":
        """A producer of its own; there is no state."""
        return KafkaPart(Producer(self._kafka, self._client_id), self._topic, self._kafka.timeout_s)


class KafkaPart(StatefulSinkPartition[Outgoing, None]):
    """Sends at once, and holds the epoch until everything is delivered."""

    def __init__(self, producer: Producer, topic: str, timeout_s: float) -> None:
        self._producer, self._topic, self._timeout_s = producer, topic, timeout_s

    def write_batch(self, values: list[Outgoing]) -> None:
        """Queue messages.

        Raises:
            BrokerError: the queue stayed full, or an earlier delivery failed.
        """
        for key, value in values:
            self._producer.send(self._topic, key, value.to_bytes() if isinstance(value, Message) else value)
        self._producer.poll()

    def snapshot(self) -> None:
        """The end of an epoch: everything is delivered.

        Raises:
            BrokerError: something is not, within `kafka.timeout_s`; the epoch does not become durable and is run again.
        """
        self._producer.flush(self._timeout_s)

    def close(self) -> None:
        """Let go. Nothing is waited for: what the last epoch sent was delivered at its end."""


def kafka_output(step_id: str, messages: KeyedStream[Message | bytes], sink: KafkaSink) -> None:
    """Send `messages`, (key, Message | bytes), through `sink`; the stream's key is the message's key."""
    op.output(step_id, op.map(f"{step_id}_keys", messages, lambda item: (item[0], item)), sink)
