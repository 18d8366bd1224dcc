"""Rounds of end offsets: where every log of a source ended at one moment, asked again and again without waiting."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from flows.connectors.pulse import Patience
from infra.kafka import client_settings
from schemas.settings import Kafka

Ends = Mapping[tuple[str, int], int]
"""(contract topic, partition) -> offset after its last message."""


class EndOffsets:
    """Asks for the end offsets of `places`; a round begins at least `interval_s` after the one before was answered.

    Shared by the parts of a source, over threads.
    """

    def __init__(
        self, kafka: Kafka, client_id: str, part: str, places: Sequence[tuple[str, int]], interval_s: float
    ) -> None:
        self._kafka, self._places, self._interval_s = kafka, list(places), interval_s
        self._admin = AdminClient(client_settings(kafka, client_id))
        self._patience = Patience(part, kafka.timeout_s)
        self._lock = threading.Lock()
        self._futures: dict[tuple[str, int], Future[Any]] = {}
        self._due = 0.0
        self._number = 0
        self._ends: Ends = {}

    def poll(self) -> tuple[int, Ends]:
        """Number (0: none yet) and end offsets of the newest round.

        Raises:
            BrokerError: no round was answered for longer than `kafka.timeout_s`.
        """
        with self._lock:
            if self._futures and all(f.done() for f in self._futures.values()):
                self._finish()
            elif not self._futures and time.monotonic() >= self._due:
                self._ask()
            return self._number, self._ends

    def _ask(self) -> None:
        names = {
            TopicPartition(self._kafka.topic(topic), partition): (topic, partition) for topic, partition in self._places
        }
        latest: Any = OffsetSpec.latest()
        asked = self._admin.list_offsets(
            {place: latest for place in names},
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=min(5.0, self._kafka.timeout_s),
        )
        self._futures = {names[place]: future for place, future in asked.items()}

    def _finish(self) -> None:
        futures, self._futures = self._futures, {}
        self._due = time.monotonic() + self._interval_s
        try:
            self._ends = {place: future.result().offset for place, future in futures.items()}
            self._number += 1
            self._patience.ok()
        except KafkaException as error:
            self._patience.trouble(f"asking for end offsets: {error.args[0].str()}")
