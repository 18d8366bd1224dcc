"""Reads single messages of a log again, by partition and offset."""

import time

from confluent_kafka import Consumer, KafkaError, TopicPartition

from infra.kafka import consumer
from schemas.errors import BrokerError
from schemas.settings import Kafka


class Refetch:
    """Messages of the contract topic `topic`, one at a time. Connects when first asked."""

    def __init__(self, kafka: Kafka, topic: str, client_id: str) -> None:
        self._kafka, self._topic, self._client_id = kafka, topic, client_id
        self._consumer: Consumer | None = None

    def read(self, partition: int, offset: int) -> bytes | None:
        """The body of the message at `offset`, or None where the log does not have it any more.

        Raises:
            BrokerError: the broker did not answer within `kafka.timeout_s`.
        """
        if self._consumer is None:
            self._consumer = consumer(self._kafka, self._client_id, **{"fetch.wait.max.ms": 20})
        place = TopicPartition(self._kafka.topic(self._topic), partition, offset)
        self._consumer.assign([place])
        deadline = time.monotonic() + self._kafka.timeout_s
        while time.monotonic() < deadline:
            message = self._consumer.poll(0.1)
            if message is None:
                continue
            fault = message.error()
            if fault is None:
                return message.value() if message.offset() == offset else None
            if fault.code() in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}:
                return None
        raise BrokerError(
            f"no answer for offset {offset} of {place.topic}/{partition} within {self._kafka.timeout_s:g} s; "
            "is the broker up?"
        )
