"""Reads single messages of a log again, by partition and offset."""

import time

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from flows.connectors.reader import headers_of
from infra.claims import Claims
from infra.kafka import consumer
from schemas.errors import BrokerError, ContractError
from schemas.settings import Kafka


class Refetch:
    """Messages of the contract topic `topic`, one at a time. Connects when first asked."""

    def __init__(self, kafka: Kafka, topic: str, client_id: str, claims: Claims) -> None:
        self._kafka, self._topic, self._client_id, self._claims = kafka, topic, client_id, claims
        self._consumer: Consumer | None = None

    def read(self, partition: int, offset: int) -> bytes | None:
        """The body of the message at `offset`, or None where the log, or the claims store, does not have it any more.

        Raises:
            BrokerError: the broker did not answer within `kafka.timeout_s`.
            LakeError: the message is a claim, and their store does not answer.
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
                return self._body(message) if message.offset() == offset else None
            if fault.code() in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}:
                return None
        raise BrokerError(
            f"no answer for offset {offset} of {place.topic}/{partition} within {self._kafka.timeout_s:g} s; "
            "is the broker up?"
        )

    def _body(self, message: Message) -> bytes | None:
        try:
            return self._claims.body(dict(headers_of(message)), message.value() or b"")
        except ContractError:
            return None
