"""Kafka sources: `MergeSource`, one deterministic order over several topics; `TopicsSource`, each log by itself."""

import threading
from collections.abc import Sequence

from bytewax.inputs import FixedPartitionedSource

from flows.connectors.ends import EndOffsets
from flows.connectors.epochs import EpochPart, Flag, Item, Never, State
from flows.connectors.parts import CLOCK, ROUND_S, ClockPart, MergePart, TopicPart
from flows.connectors.pulse import PULSE
from flows.connectors.reader import Reader
from schemas.settings import Kafka
from schemas.topics import TOPICS

_LIVENESS_S = 2.0
"""Time between rounds of end offsets where they only tell that the broker is there."""


class KafkaSource(FixedPartitionedSource[Item, State | None]):
    """What both sources have in common.

    Args:
        kafka: the broker.
        topics: contract names.
        epoch_bytes: most bytes of messages in an epoch, over all partitions.
        skip_expired: emit a `Hole` for expired offsets instead of ending with an error.
        client_id: name of this consumer on the broker.
        stop_at_end: end after what the logs hold when the flow starts.
        stop: ends the source cleanly when it becomes true.
    """

    round_s: float

    def __init__(
        self,
        kafka: Kafka,
        topics: Sequence[str],
        *,
        epoch_bytes: int,
        skip_expired: bool,
        client_id: str,
        stop_at_end: bool = False,
        stop: Flag | None = None,
    ) -> None:
        self.kafka, self.topics = kafka, tuple(topics)
        self.client_id, self.skip_expired, self.stop_at_end = client_id, skip_expired, stop_at_end
        self.epoch_bytes = max(1, epoch_bytes // len(self.list_parts()))
        self.stop = Never() if stop is None else stop
        self._lock = threading.Lock()
        self._ends: EndOffsets | None = None

    def reader(self, part: str, places: dict[str, tuple[int, int | None]]) -> Reader:
        """A reader of one partition each (topic -> (partition, next offset)), for the source partition `part`."""
        return Reader(self.kafka, self.client_id, part, places, self.skip_expired)

    def ends(self) -> EndOffsets:
        """The rounds of end offsets that all partitions in this process share."""
        with self._lock:
            if self._ends is None:
                places = [(t, p) for t in self.topics for p in range(_num_partitions(self.kafka, t))]
                self._ends = EndOffsets(self.kafka, self.client_id, self.client_id, places, self.round_s)
            return self._ends


class MergeSource(KafkaSource):
    """Partition p of the data topic, the first of `topics`, merged with the others by broker timestamp.

    Emits Tick | Raw, and Hole with `skip_expired`. The order is a function of the logs alone: timestamp, then `topics`
    as listed, then offset. The others have one partition, and their messages come once for each partition of the data
    topic (a lane), each of which has an order of its own.
    """

    round_s = ROUND_S

    def list_parts(self) -> list[str]:
        """One for each partition of the data topic."""
        return _parts(self.kafka, self.topics[:1])

    def build_part(self, step_id: str, for_part: str, resume_state: State | None) -> EpochPart:
        """Read on where `resume_state` says."""
        return MergePart(self, for_part, resume_state)


class TopicsSource(KafkaSource):
    """Every partition of `topics`, each in its own order; with `tick_s` also a `Clock` item that often.

    Emits Tick | Raw | Clock, and Hole with `skip_expired`. A bounded source has no clock.
    """

    round_s = _LIVENESS_S

    def __init__(
        self,
        kafka: Kafka,
        topics: Sequence[str],
        *,
        epoch_bytes: int,
        skip_expired: bool,
        client_id: str,
        tick_s: float | None = None,
        stop_at_end: bool = False,
        stop: Flag | None = None,
    ) -> None:
        self.tick_s = tick_s
        super().__init__(
            kafka,
            topics,
            epoch_bytes=epoch_bytes,
            skip_expired=skip_expired,
            client_id=client_id,
            stop_at_end=stop_at_end,
            stop=stop,
        )

    def list_parts(self) -> list[str]:
        """One for each partition of each topic, and one for the clock."""
        return _parts(self.kafka, self.topics) + ([CLOCK] if self.tick_s is not None else [])

    def build_part(self, step_id: str, for_part: str, resume_state: State | None) -> EpochPart:
        """Read on where `resume_state` says."""
        if for_part == CLOCK:
            return ClockPart(self.tick_s or 1.0, self.stop, self.stop_at_end)
        return TopicPart(self, for_part, resume_state)


def _num_partitions(kafka: Kafka, topic: str) -> int:
    return kafka.partitions if TOPICS[topic].partitioned else 1


def _parts(kafka: Kafka, topics: Sequence[str]) -> list[str]:
    PULSE.stand()  # Bytewax asks for parts in every process, once all are connected
    return [f"{p:05d}/{topic}" for topic in topics for p in range(_num_partitions(kafka, topic))]
