"""Kafka sources: `MergeSource`, one deterministic order over several topics; `TopicsSource`, each log by itself."""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Sequence

from bytewax.inputs import FixedPartitionedSource

from flows.connectors.ends import EndOffsets
from flows.connectors.epochs import EpochPart, Flag, Item, Never, State
from flows.connectors.items import Clock, Hole, Raw
from flows.connectors.merge import Merge
from flows.connectors.pulse import log
from flows.connectors.reader import End, Reader
from schemas.settings import Kafka
from schemas.topics import TOPICS

ROUND_S = 0.05
"""Time between rounds of end offsets; clocks of brokers, and their replicas, may lag by less than this."""

_MAX_WAITING_BYTES = 16 * 1024 * 1024
_CLOCK = "clock"


class MergeSource(FixedPartitionedSource[Item, State | None]):
    """Partition p of `data_topic`, merged with the single-partition `side_topics` by broker timestamp.

    Emits Tick | Raw, and Hole with `skip_expired`. The order is a function of the logs alone: timestamp, then
    `data_topic` before `side_topics` as listed, then offset. Side messages come once for each partition of
    `data_topic` (a lane), each of which has an order of its own.

    Args:
        kafka: the broker.
        data_topic: contract name of the partitioned topic.
        side_topics: contract names of topics with one partition.
        epoch_bytes: most bytes of messages in an epoch, over all partitions.
        skip_expired: emit a `Hole` for expired offsets instead of ending with an error.
        client_id: name of this consumer on the broker.
        stop_at_end: end after what the logs hold when the flow starts.
        stop: ends the source cleanly when it becomes true.
    """

    def __init__(
        self,
        kafka: Kafka,
        data_topic: str,
        side_topics: Sequence[str],
        *,
        epoch_bytes: int,
        skip_expired: bool,
        client_id: str,
        stop_at_end: bool = False,
        stop: Flag | None = None,
    ) -> None:
        self.kafka, self.client_id, self.skip_expired, self.stop_at_end = kafka, client_id, skip_expired, stop_at_end
        self.topics = (data_topic, *side_topics)
        self.epoch_bytes = max(1, epoch_bytes // _num_partitions(kafka, data_topic))
        self.stop = Never() if stop is None else stop
        self._lock = threading.Lock()
        self._ends: EndOffsets | None = None

    def list_parts(self) -> list[str]:
        """One for each partition of the data topic."""
        return _parts(self.kafka, [self.topics[0]])

    def build_part(self, step_id: str, for_part: str, resume_state: State | None) -> EpochPart:
        """Read on where `resume_state` says."""
        return _MergePart(self, for_part, resume_state)

    def ends(self) -> EndOffsets:
        """The rounds of end offsets that all partitions in this process share."""
        with self._lock:
            if self._ends is None:
                data, *side = self.topics
                places = [(data, p) for p in range(_num_partitions(self.kafka, data))] + [(t, 0) for t in side]
                self._ends = EndOffsets(self.kafka, self.client_id, self.client_id, places, ROUND_S)
            return self._ends


class _MergePart(EpochPart):
    """One partition of a MergeSource. State: topic -> (next offset, timestamp) of what was emitted."""

    def __init__(self, source: MergeSource, part: str, state: State | None) -> None:
        super().__init__(part, source.epoch_bytes, source.stop)
        data, *side = source.topics
        self._lane = int(part.partition("/")[0])
        self._partitions = {data: self._lane} | dict.fromkeys(side, 0)
        self._merge = Merge(source.topics, state, bounded=source.stop_at_end)
        self._ends, self._round = source.ends(), 0
        places = {t: (p, state[t][0] if state and t in state else None) for t, p in self._partitions.items()}
        self._reader = Reader(source.kafka, source.client_id, part, places, source.skip_expired)
        self._positions = [dict.fromkeys(source.topics, 0)] * 2
        self._num_late = 0

    def pull(self, max_items: int, max_bytes: int) -> Sequence[Raw | Hole]:
        """Read what has come and take what is in order."""
        self._next_round()
        if self._round == 0:
            return []
        for item in self._reader.read(max_items):
            self._add(item)
        for topic in self._partitions:
            self._reader.pause(topic, self._merge.waiting_bytes(topic) > _MAX_WAITING_BYTES)
        taken = self._merge.take(max_items, max_bytes)
        self._report_late()
        return taken

    def position(self) -> State | None:
        """Next offset and timestamp of each topic that something was emitted of."""
        return self._merge.state() or None

    def at_end(self) -> bool:
        """Whether a bounded merge has emitted everything."""
        return self._merge.is_complete

    def close(self) -> None:
        """Leave the broker."""
        self._reader.close()
        super().close()

    def _next_round(self) -> None:
        number, ends = self._ends.poll()
        if number == self._round:
            return
        own = {topic: ends[topic, partition] for topic, partition in self._partitions.items()}
        before, self._positions = self._positions[0], [self._positions[1], self._merge.positions()]
        for topic, end in own.items():  # two rounds ago this one was not yet asked for
            self._reader.check_end(topic, before[topic], end)
        self._merge.round(own)
        self._round = number

    def _add(self, item: Raw | Hole | End) -> None:
        if isinstance(item, End):
            self._merge.reached(item.topic, item.offset)
        else:
            timestamp = self._merge.timestamp(item.topic, item.timestamp)
            self._merge.add(dataclasses.replace(item, timestamp=timestamp, lane=self._lane))

    def _report_late(self) -> None:
        if self._merge.num_late > self._num_late:
            self._num_late = self._merge.num_late
            log.warning(
                "%s: %d messages so far became visible more than %g s after their timestamp; a replay orders them "
                "otherwise. Compare the brokers' clocks and the lag of their replicas",
                *(self.part, self._num_late, ROUND_S),
            )


class TopicsSource(FixedPartitionedSource[Item, State | None]):
    """Every partition of `topics`, each in its own order; with `tick_s` also a `Clock` item that often.

    Emits Tick | Raw | Clock. Other arguments as for `MergeSource`; a bounded source has no clock.
    """

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
        self.kafka, self.client_id, self.skip_expired, self.stop_at_end = kafka, client_id, skip_expired, stop_at_end
        self.topics, self.tick_s = tuple(topics), tick_s
        self.epoch_bytes = max(1, epoch_bytes // len(_parts(kafka, topics)))
        self.stop = Never() if stop is None else stop

    def list_parts(self) -> list[str]:
        """One for each partition of each topic, and one for the clock."""
        return _parts(self.kafka, self.topics) + ([_CLOCK] if self.tick_s is not None else [])

    def build_part(self, step_id: str, for_part: str, resume_state: State | None) -> EpochPart:
        """Read on where `resume_state` says."""
        if for_part == _CLOCK:
            return _ClockPart(self.tick_s or 1.0, self.stop, self.stop_at_end)
        return _TopicPart(self, for_part, resume_state)


class _TopicPart(EpochPart):
    """One partition of one topic. State: next offset and timestamp of what was emitted."""

    def __init__(self, source: TopicsSource, part: str, state: State | None) -> None:
        super().__init__(part, source.epoch_bytes, source.stop)
        number, _, self._topic = part.partition("/")
        self._offset: int | None = state["offset"] if state else None
        self._timestamp: int = state["timestamp"] if state else 0
        place = (int(number), self._offset)
        self._reader = Reader(source.kafka, source.client_id, part, {self._topic: place}, source.skip_expired)
        self._bounded, self._end_seen = source.stop_at_end, False
        self._waiting: deque[Raw | Hole] = deque()

    def pull(self, max_items: int, max_bytes: int) -> Sequence[Raw | Hole]:
        """Read what has come, once what had come before is emitted."""
        if not self._waiting:
            self._read(max_items)
        items: list[Raw | Hole] = []
        while self._waiting and max_bytes > 0:
            item = self._waiting.popleft()
            items.append(item)
            max_bytes -= item.num_bytes
            self._offset, self._timestamp = item.next_offset, item.timestamp
        return items

    def position(self) -> State | None:
        """Next offset and timestamp, if anything was emitted."""
        return None if self._offset is None else {"offset": self._offset, "timestamp": self._timestamp}

    def at_end(self) -> bool:
        """Whether a bounded source has emitted all up to the end of its log."""
        return self._bounded and self._end_seen and not self._waiting

    def close(self) -> None:
        """Leave the broker."""
        self._reader.close()
        super().close()

    def _read(self, max_items: int) -> None:
        timestamp = self._timestamp
        for item in self._reader.read(max_items):
            if isinstance(item, End):
                self._end_seen = True
            else:
                timestamp = max(timestamp, item.timestamp)
                self._waiting.append(dataclasses.replace(item, timestamp=timestamp, lane=item.partition))


class _ClockPart(EpochPart):
    """Reads the wall clock every `tick_s`; it has no state."""

    def __init__(self, tick_s: float, stop: Flag, bounded: bool) -> None:
        super().__init__(_CLOCK, 1, stop)
        self._tick_s, self._bounded, self._due = tick_s, bounded, 0.0

    def pull(self, max_items: int, max_bytes: int) -> Sequence[Clock]:
        """The time, if it is due; never two at once to make up for a pause."""
        now = time.monotonic()
        if self._bounded or now < self._due:
            return []
        self._due = now + self._tick_s
        return [Clock(time.time_ns() // 1_000_000)]

    def position(self) -> None:
        """Time needs no state."""

    def at_end(self) -> bool:
        """Whether a bounded source has a clock: no."""
        return self._bounded


def _num_partitions(kafka: Kafka, topic: str) -> int:
    return kafka.partitions if TOPICS[topic].partitioned else 1


def _parts(kafka: Kafka, topics: Sequence[str]) -> list[str]:
    return [f"{p:05d}/{topic}" for topic in topics for p in range(_num_partitions(kafka, topic))]
