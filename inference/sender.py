"""From finished episodes to Kafka: outbox, packs, and one message in flight per partition."""

import time
from typing import Protocol

from prometheus_client import Counter, Gauge

from inference.outbox import Outbox, Pack
from inference.packs import Packer
from infra import failpoints
from infra.kafka.producer import OnDelivery
from schemas.errors import BrokerError
from schemas.ids import partition_of
from schemas.topics import TRAJECTORIES
from schemas.trajectory import Trajectory

OUTBOX_BYTES = Gauge("lagoon_outbox_bytes", "Bytes of finished episodes on disk")
SEND_FAILURES = Counter(
    "lagoon_outbox_send_failures", "Messages that will be sent again because Kafka did not take them"
)


class Producer(Protocol):
    """What sending needs of `infra.kafka.Producer`."""

    def send(
        self,
        topic: str,
        key: str,
        value: bytes,
        *,
        headers: dict[str, bytes],
        partition: int,
        on_delivery: OnDelivery,
    ) -> None: ...


class Sender:
    """Takes finished episodes and sees them into Kafka.

    A partition's next message goes out when the one before is acknowledged: a message that fails and is sent again can
    then never arrive behind a later one, which a reader that goes by sequence would take for a repetition.
    """

    def __init__(
        self, outbox: Outbox, packer: Packer, producer: Producer, num_partitions: int, retry_s: float = 1.0
    ) -> None:
        self._outbox, self._packer, self._producer = outbox, packer, producer
        self._num_partitions, self._retry_s = num_partitions, retry_s
        self._in_flight: set[int] = set()
        self._retry_at: dict[int, float] = {}
        self.error: BrokerError | None = None
        """Why the last message was not taken; None once one is."""
        packer.add(outbox.loose, 0.0)

    def finished(self, trajectory: Trajectory) -> None:
        """Keep an episode whose start the packer knows of."""
        self._packer.finished(self._outbox.append(trajectory), time.monotonic())

    def send(self, force: bool = False) -> None:
        """Pack what is ready (everything with `force`) and send what may go."""
        packs = self._packer.take(time.monotonic(), force)
        for episodes in packs:
            self._outbox.pack(episodes, partition_of(episodes[0].task_id, self._num_partitions))
        for partition in self._outbox.partitions:
            pack = self._outbox.oldest(partition)
            if pack and partition not in self._in_flight and time.monotonic() >= self._retry_at.get(partition, 0):
                self._send(pack)
        OUTBOX_BYTES.set(self._outbox.num_bytes)

    def _send(self, pack: Pack) -> None:
        body, headers = self._outbox.message(pack)
        self._outbox.sync()
        self._in_flight.add(pack.partition)
        try:
            self._producer.send(
                TRAJECTORIES.name,
                pack.key,
                body,
                headers=headers,
                partition=pack.partition,
                on_delivery=lambda error: self._delivered(pack, error),
            )
        except BrokerError as error:
            self._delivered(pack, error)
        failpoints.hit("outbox.after_send")

    def _delivered(self, pack: Pack, error: BrokerError | None) -> None:
        self._in_flight.discard(pack.partition)
        self.error = error
        if error is None:
            self._outbox.acknowledge(pack)
        else:
            SEND_FAILURES.inc()
            self._retry_at[pack.partition] = time.monotonic() + self._retry_s
