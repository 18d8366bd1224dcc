"""Source partitions: a merge of several logs, one log, the clock."""

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flows.connectors.epochs import EpochPart, Flag, State
from flows.connectors.items import Clock, Hole, Raw
from flows.connectors.merge import Merge
from flows.connectors.pulse import PULSE, log
from flows.connectors.reader import End

if TYPE_CHECKING:
    from flows.connectors.kafka_source import KafkaSource

CLOCK = "clock"
"""Name of the source partition that reads the wall clock."""

ROUND_S = 0.05
"""Time between rounds of end offsets of a merge; clocks of brokers, and their replicas, may lag by less than this."""

BEHIND_S = 5.0
"""A broker's clock that was set back by more than this is shown in health."""

MAX_WAITING_BYTES = 16 * 1024 * 1024
"""A topic with more than this waiting to be merged is not read on."""


class MergePart(EpochPart):
    """One partition of a MergeSource. State: topic -> (next offset, timestamp) of what was emitted."""

    def __init__(self, source: "KafkaSource", part: str, state: State | None) -> None:
        super().__init__(part, source.epoch_bytes, source.stop)
        data, *side = source.topics
        self._lane = int(part.partition("/")[0])
        self._partitions = {data: self._lane} | dict.fromkeys(side, 0)
        self._merge = Merge(source.topics, state, bounded=source.stop_at_end)
        self._ends, self._round = source.ends(), 0
        places = {t: (p, state[t][0] if state and t in state else None) for t, p in self._partitions.items()}
        self._reader = source.reader(part, places)
        self._num_late = 0
        self._is_behind = False

    def pull(self, max_items: int, max_bytes: int) -> Sequence[Raw | Hole]:
        """Read what has come and take what is in order."""
        self._next_round()
        if self._round == 0:
            return []
        for item in self._reader.read(max_items):
            self._add(item)
        for topic in self._partitions:
            self._reader.pause(topic, self._merge.waiting_bytes(topic) > MAX_WAITING_BYTES)
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
        self._reader.check_ends(own)
        self._merge.round(own)
        self._round = number

    def _add(self, item: Raw | Hole | End) -> None:
        if isinstance(item, End):
            self._merge.reached(item.topic, item.offset)
        else:
            timestamp = self._merge.timestamp(item.topic, item.timestamp)
            if isinstance(item, Raw):
                self._note_clock((timestamp - item.timestamp) / 1000)
            self._merge.add(dataclasses.replace(item, timestamp=timestamp, lane=self._lane))

    def _note_clock(self, behind_s: float) -> None:
        """Say that the broker's clock was set back: messages keep their order, but time stands still for so long."""
        if (behind_s > BEHIND_S) == self._is_behind:
            return
        self._is_behind = not self._is_behind
        reason = (
            f"the broker's clock was set back by {behind_s:.0f} s. Decision: go on; until it has caught up, groups "
            "close only by their last member"
        )
        log.warning("%s: %s", self.part, reason if self._is_behind else "the broker's clock has caught up")
        PULSE.trouble(f"{self.part} clock", reason if self._is_behind else None)

    def _report_late(self) -> None:
        if self._merge.num_late > self._num_late:
            self._num_late = self._merge.num_late
            log.warning(
                "%s: %d messages so far became visible more than %g s after their timestamp; a replay orders them "
                "otherwise. Compare the brokers' clocks and the lag of their replicas",
                *(self.part, self._num_late, ROUND_S),
            )


class TopicPart(EpochPart):
    """One partition of one topic. State: next offset and timestamp of what was emitted."""

    def __init__(self, source: "KafkaSource", part: str, state: State | None) -> None:
        super().__init__(part, source.epoch_bytes, source.stop)
        number, _, self._topic = part.partition("/")
        self._partition = int(number)
        self._offset: int | None = state["offset"] if state else None
        self._timestamp: int = state["timestamp"] if state else 0
        self._reader = source.reader(part, {self._topic: (self._partition, self._offset)})
        self._ends, self._round = source.ends(), 0
        self._bounded, self._first_end = source.stop_at_end, 0
        self._waiting: deque[Raw | Hole] = deque()

    def pull(self, max_items: int, max_bytes: int) -> Sequence[Raw | Hole]:
        """Read what has come, once what had come before is emitted."""
        self._next_round()
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
        """Whether a bounded source has emitted all that its log held at the start."""
        is_read = self._round > 0 and self._reader.position(self._topic) >= self._first_end
        return self._bounded and is_read and not self._waiting

    def close(self) -> None:
        """Leave the broker."""
        self._reader.close()
        super().close()

    def _next_round(self) -> None:
        number, ends = self._ends.poll()
        if number != self._round:
            end = ends[self._topic, self._partition]
            self._reader.check_ends({self._topic: end})
            self._first_end = self._first_end if self._round else end
            self._round = number

    def _read(self, max_items: int) -> None:
        timestamp = self._timestamp
        for item in self._reader.read(max_items):
            if not isinstance(item, End):
                timestamp = max(timestamp, item.timestamp)
                self._waiting.append(dataclasses.replace(item, timestamp=timestamp, lane=self._partition))


class ClockPart(EpochPart):
    """Reads the wall clock every `tick_s`; it has no state."""

    def __init__(self, tick_s: float, stop: Flag, bounded: bool) -> None:
        super().__init__(CLOCK, 1, stop)
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
