"""From finished episodes to Kafka: outbox, packs, and one message in flight per partition.

A pack that is larger than a message may be is split; a trajectory that is so by itself goes into the claims store, and
the message claims it. Objects are written by threads of their own, so that a store that is away delays nothing else.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from prometheus_client import Counter, Gauge

from inference.outbox import Episode, Outbox, Pack
from inference.packs import Packer, fitting
from infra import disk, failpoints
from infra.claims import Claims
from infra.kafka.producer import OnDelivery
from infra.logs import logger
from schemas.claims import MAX_CLAIM_BYTES, Claim
from schemas.errors import BrokerError, LagoonError, LakeError
from schemas.ids import partition_of
from schemas.names import Service
from schemas.settings import Settings
from schemas.topics import TRAJECTORIES
from schemas.trajectory import Trajectory

OUTBOX_BYTES = Gauge("lagoon_outbox_bytes", "Bytes of finished episodes on disk")
SEND_FAILURES = Counter(
    "lagoon_outbox_send_failures",
    "Messages that will be sent again because Kafka or the claims store did not take them",
)
SET_ASIDE = Counter("lagoon_outbox_set_aside", "Trajectories too large even for a claim; their bodies stay as files")

MESSAGE_OVERHEAD = 512
"""Bytes of a message that are not its body: key, headers, framing."""


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


class ClaimStore(Protocol):
    """What sending needs of `infra.claims.Claims`."""

    def put(self, body: bytes) -> Claim: ...


class Sender:
    """Takes finished episodes and sees them into Kafka.

    A partition's next message goes out when the one before is acknowledged: a message that fails and is sent again can
    then never arrive behind a later one, which a reader that goes by sequence would take for a repetition.
    """

    def __init__(
        self,
        outbox: Outbox,
        packer: Packer,
        producer: Producer,
        claims: ClaimStore,
        *,
        num_partitions: int,
        max_message_bytes: int,
        retry_s: float = 1.0,
    ) -> None:
        self._outbox, self._packer, self._producer, self._claims = outbox, packer, producer, claims
        self._num_partitions, self._retry_s = num_partitions, retry_s
        self._max_body = max_message_bytes - MESSAGE_OVERHEAD
        self._pool = ThreadPoolExecutor(4, "claims")
        self._uploads: dict[Future[Claim], tuple[Pack, Mapping[str, bytes]]] = {}
        self._in_flight: set[int] = set()
        self._log: Any = logger(Service.ROLLOUT)
        self._retry_at: dict[int, float] = {}
        self._errors: dict[int, LagoonError] = {}
        self.full = ""
        """Why episodes cannot be packed; empty where they can."""
        packer.add(outbox.loose, 0.0)

    @property
    def unsent(self) -> str:
        """Why finished episodes wait in the outbox; empty where nothing keeps them."""
        if isinstance(self.error, BrokerError):
            return f"Kafka takes no episodes: {self.error}"
        return f"episodes wait in the outbox: {self.error}" if self.error else ""

    @property
    def no_place(self) -> str:
        """Why no more episodes may begin: they would find no place on disk; empty where they would."""
        limit = f"the outbox is full ({self._outbox.num_bytes} bytes), so no tasks are pulled"
        return self.full or (limit if self._outbox.is_full else "")

    @classmethod
    def of(cls, settings: Settings, outbox: Outbox, packer: Packer, producer: Producer) -> "Sender":
        """With the topics and the store for claims of `settings`."""
        kafka = settings.kafka
        return cls(
            outbox,
            packer,
            producer,
            Claims.of(settings),
            num_partitions=kafka.partitions,
            max_message_bytes=kafka.max_message_bytes,
        )

    @property
    def error(self) -> LagoonError | None:
        """Why the oldest message of some partition was not taken; None once all are."""
        return next(iter(self._errors.values()), None)

    def finished(self, trajectory: Trajectory) -> None:
        """Keep an episode whose start the packer knows of."""
        self._packer.finished(self._outbox.append(trajectory), time.monotonic())

    def send(self, force: bool = False) -> None:
        """Pack what is ready (everything with `force`) and send what may go."""
        for episodes in self._packer.take(time.monotonic(), force):
            for part in fitting(episodes, self._max_body):
                self._pack(part)
        self._claim()
        for partition in self._outbox.partitions:
            pack = self._outbox.oldest(partition)
            if pack and partition not in self._in_flight and time.monotonic() >= self._retry_at.get(partition, 0):
                self._send(pack)
        OUTBOX_BYTES.set(self._outbox.num_bytes)

    def _pack(self, episodes: Sequence[Episode]) -> None:
        try:
            self._outbox.pack(episodes, partition_of(episodes[0].task_id, self._num_partitions))
        except OSError as error:
            if not disk.is_full(error):
                raise
            self.full = f"{disk.full(self._outbox.folder)}. Decision: finished episodes wait there to be sent"
            self._packer.add(episodes, time.monotonic())
        else:
            self.full = ""

    def close(self) -> None:
        """Begin no more uploads; those that run end by themselves, and are repeated in the next life."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, pack: Pack) -> None:
        body, headers = self._outbox.message(pack)
        self._outbox.sync()
        self._in_flight.add(pack.partition)
        if len(body) <= self._max_body:
            self._produce(pack, body, headers)
        elif len(body) <= MAX_CLAIM_BYTES:
            self._uploads[self._pool.submit(self._claims.put, body)] = pack, headers
        else:
            self._report(pack, body, headers)

    def _claim(self) -> None:
        """Send the claims of bodies that are in the store by now."""
        for upload in [u for u in self._uploads if u.done()]:
            pack, headers = self._uploads.pop(upload)
            try:
                claim = upload.result()
            except LakeError as error:
                self._delivered(pack, error)
                continue
            failpoints.hit("outbox.after_claim")
            self._produce(pack, claim.to_bytes(), {**headers, **claim.header})

    def _report(self, pack: Pack, body: bytes, headers: Mapping[str, bytes]) -> None:
        """Send a claim that its reader refuses by its size: it becomes a dead letter, which counts the trajectory."""
        claim = Claim.of(body)
        if path := self._outbox.set_aside(pack, body):
            SET_ASIDE.inc()
            self._log.error("too large to send, set aside", bytes=len(body), most=MAX_CLAIM_BYTES, kept_as=str(path))
        self._produce(pack, claim.to_bytes(), {**headers, **claim.header})

    def _produce(self, pack: Pack, body: bytes, headers: dict[str, bytes]) -> None:
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

    def _delivered(self, pack: Pack, error: LagoonError | None) -> None:
        self._in_flight.discard(pack.partition)
        if error is None:
            self._errors.pop(pack.partition, None)
            self._outbox.acknowledge(pack)
        else:
            self._errors[pack.partition] = error
            SEND_FAILURES.inc()
            self._retry_at[pack.partition] = time.monotonic() + self._retry_s
