"""Rounds of end offsets: where every log of a source ended at one moment, asked again and again without waiting."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from flows.connectors.layout import Layout
from flows.connectors.pulse import Patience
from infra.kafka import client_settings
from schemas.settings import Kafka

_RETRY_S = 0.5

Ends = Mapping[tuple[str, int], int]
"""(contract topic, partition) -> offset after its last message."""


class EndOffsets:
    """Asks for the end offsets of `places`; a round begins at least `interval_s` after the one before was answered.

    Also tells whether the broker is there, which a quiet log does not. Shared by the parts of a source, over threads.

    Failed answers are looked at, here and in `Layout`, and not raised: see `infra.kafka.administrator` for the cycle
    that a client would be in which is given up.
    """

    def __init__(
        self, kafka: Kafka, client_id: str, part: str, places: Sequence[tuple[str, int]], interval_s: float
    ) -> None:
        self._kafka, self._places, self._interval_s = kafka, list(places), interval_s
        self._settings = client_settings(kafka, client_id)
        self._admin = AdminClient(self._settings)
        self._patience = Patience(part, kafka.timeout_s)
        self._lock = threading.Lock()
        self._layout = Layout(kafka, places)
        self._futures: dict[tuple[str, int], Future[Any]] = {}
        self._due = 0.0
        self._number = 0
        self._ends: Ends = {}

    def poll(self) -> tuple[int, Ends]:
        """Number (0: none yet) and end offsets of the newest round.

        Raises:
            BrokerError: no round was answered for longer than `kafka.timeout_s`, or a topic has more partitions now.
        """
        with self._lock:
            self._layout.check(self._admin)
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
        for error in (future.exception() for future in futures.values()):
            if isinstance(error, KafkaException):
                return self._fail(error.args[0].str())
        ends = {place: future.result().offset for place, future in futures.items()}
        if min(ends.values()) < 0:  # a broker that has just started may answer so
            return self._fail("an answer without offsets")
        self._ends = ends
        self._number += 1
        return self._patience.ok()

    def _fail(self, reason: str) -> None:
        """Try again with a new client: this one keeps to leaders, and their epochs, that may be gone."""
        self._due = time.monotonic() + _RETRY_S
        self._admin = AdminClient(self._settings)
        self._patience.trouble(f"asking for end offsets: {reason}")
