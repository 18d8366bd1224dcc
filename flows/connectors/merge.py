"""One order over several logs, whichever way their messages arrive: timestamp, then rank of the log, then offset.

A message may leave when nothing that comes later can precede it. Two things bound what can still come:

- A log that has not been read to its known end: its next message lies behind its last one read.
- A log that has: its next message is appended after the newest round of end offsets was asked for, and so after every
  message that lay below the end offsets of the round before (brokers stamp messages when they append them). The rounds
  are some time apart, so its timestamp is larger, even where the clocks of brokers differ by less than that time.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flows.connectors.items import Hole, Raw

Key = tuple[int, int, int]
"""Timestamp in ms, rank of the log, offset."""


@dataclass(slots=True)
class Log:
    """What is known of one log. Every offset below `position` has been read, those from `emitted` on not emitted."""

    topic: str
    rank: int
    position: int = 0
    timestamp: int = 0
    """Largest timestamp read."""
    emitted: int | None = None
    emitted_timestamp: int = 0
    end: int | None = None
    """End offset in the newest round; None before the first."""
    before: int = 0
    """End offset in the round before."""
    settled: int = 0
    """Largest timestamp read below `before`."""
    waiting: deque[Raw | Hole] = field(default_factory=deque)
    waiting_bytes: int = 0

    @property
    def is_read(self) -> bool:
        """Whether it has been read to its end as of the newest round."""
        return self.end is not None and self.position >= self.end

    @property
    def horizon(self) -> Key:
        """No later message of this log has a smaller key."""
        return (self.timestamp, self.rank, self.position)

    def head(self) -> Key:
        """Key of the first message that waits."""
        return (self.waiting[0].timestamp, self.rank, self.waiting[0].offset)


class Merge:
    """Merges `topics`, ranked as listed. `state` is what `state()` returned when the last item was taken.

    With `bounded` it ends at the end offsets of the first round: later messages are ignored, and nothing is waited for.
    """

    def __init__(
        self, topics: Sequence[str], state: Mapping[str, tuple[int, int]] | None = None, bounded: bool = False
    ) -> None:
        self._logs = {topic: Log(topic, rank) for rank, topic in enumerate(topics)}
        self._bounded = bounded
        self._last: Key = (0, 0, -1)
        self.num_late = 0
        """Messages that came after one they should have preceded: a broker's clock or replica lagged by too much."""
        for topic, (offset, timestamp) in (state or {}).items():
            log = self._logs[topic]
            log.position = log.emitted = offset
            log.timestamp = log.emitted_timestamp = log.settled = timestamp

    def round(self, ends: Mapping[str, int]) -> None:
        """Note a new round of end offsets, asked for some time after the last one was answered."""
        for log in self._logs.values():
            if log.end is not None:
                log.before = log.end
                log.settled = max(log.settled, _timestamp_below(log, log.before))
            if log.end is None or not self._bounded:
                log.end = ends[log.topic]
            while self._bounded and log.waiting and log.waiting[-1].offset >= log.end:
                log.waiting_bytes -= log.waiting.pop().num_bytes

    def timestamp(self, topic: str, observed: int) -> int:
        """The timestamp that the next message of `topic` counts with: never below one before it."""
        return max(self._logs[topic].timestamp, observed)

    def add(self, item: Raw | Hole) -> None:
        """Take in the next item of a log, in offset order."""
        log = self._logs[item.topic]
        if self._bounded and log.end is not None and item.offset >= log.end:
            log.position = max(log.position, log.end)
            return
        log.waiting.append(item)
        log.waiting_bytes += item.num_bytes
        log.position = item.next_offset
        log.timestamp = item.timestamp
        if item.offset < log.before:
            log.settled = item.timestamp

    def reached(self, topic: str, offset: int) -> None:
        """Note that every message below `offset` has been read; markers and compaction leave offsets without one."""
        log = self._logs[topic]
        log.position = max(log.position, offset)

    def waiting_bytes(self, topic: str) -> int:
        """Bytes of `topic` that are read but not yet taken."""
        return self._logs[topic].waiting_bytes

    def take(self, max_items: int, max_bytes: int) -> list[Raw | Hole]:
        """The next items of the one order, at most `max_items`, stopping once they exceed `max_bytes`."""
        taken: list[Raw | Hole] = []
        size = 0
        while len(taken) < max_items and size <= max_bytes and (log := self._next()) is not None:
            item = self._pop(log)
            taken.append(item)
            size += item.num_bytes
        return taken

    def state(self) -> dict[str, tuple[int, int]]:
        """Next offset and timestamp of each topic of which something has been taken; a copy."""
        return {t: (log.emitted, log.emitted_timestamp) for t, log in self._logs.items() if log.emitted is not None}

    @property
    def is_complete(self) -> bool:
        """Whether a bounded merge has given all there is."""
        return self._bounded and all(log.is_read and not log.waiting for log in self._logs.values())

    def _next(self) -> Log | None:
        """The log whose first message may leave."""
        logs = self._logs.values()
        waiting = [log for log in logs if log.waiting]
        if not waiting or any(log.end is None for log in logs):
            return None
        first = min(waiting, key=Log.head)
        if any(not log.is_read and log.horizon <= first.head() for log in logs if log is not first):
            return None
        can_grow = not self._bounded and any(log.is_read for log in logs if log is not first)
        if can_grow and first.waiting[0].timestamp > max(log.settled for log in logs):
            return None
        return first

    def _pop(self, log: Log) -> Raw | Hole:
        key = log.head()
        self.num_late += key < self._last
        self._last = max(key, self._last)
        item = log.waiting.popleft()
        log.waiting_bytes -= item.num_bytes
        log.emitted, log.emitted_timestamp = item.next_offset, item.timestamp
        return item


def _timestamp_below(log: Log, offset: int) -> int:
    """Largest timestamp read of `log` below `offset`; what was emitted had been settled by some log."""
    return next((item.timestamp for item in reversed(log.waiting) if item.offset < offset), log.emitted_timestamp)
