"""Whether topics have the partitions that a source reads: asked now and then, without waiting for the answer."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from schemas.errors import BrokerError
from schemas.settings import Kafka

CHECK_S = 5.0
"""Time between two looks at the topics."""


class Layout:
    """The partitions that topics have, against `places` (contract topic, partition), which are those that are read."""

    def __init__(self, kafka: Kafka, places: Sequence[tuple[str, int]]) -> None:
        self._kafka = kafka
        self._read = {t: sum(topic == t for topic, _ in places) for t, _ in places}
        self._futures: Mapping[str, Future[Any]] = {}
        self._due = 0.0

    def check(self, admin: AdminClient) -> None:
        """Take note of an answer, and ask again when it is time. A broker that is away is no concern of this.

        Raises:
            BrokerError: partitions were added to a topic; nobody would read them.
        """
        if self._futures and all(f.done() for f in self._futures.values()):
            futures, self._futures = self._futures, {}
            for topic, count in self._read.items():
                self._compare(topic, count, futures[self._kafka.topic(topic)])
        elif not self._futures and time.monotonic() >= self._due:
            self._due = time.monotonic() + CHECK_S
            names = [self._kafka.topic(topic) for topic in self._read]
            timeout_s = min(5.0, self._kafka.timeout_s)
            self._futures = admin.describe_topics(TopicCollection(names), request_timeout=timeout_s)

    def _compare(self, topic: str, count: int, answer: Future[Any]) -> None:
        if isinstance(answer.exception(), KafkaException):
            return
        found = len(answer.result().partitions)
        if found > count:
            raise BrokerError(
                f"{self._kafka.topic(topic)} has {found} partitions now, and {count} are read: some were added while "
                f"this process ran. It ends, because what is in partitions {count} to {found - 1} would never be read, "
                "and a group must not change its partition. To have more partitions start a new run: "
                "docs/operations.md, Partitions"
            )
