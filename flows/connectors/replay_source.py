"""A bounded source over a range of the log, which tells how far it has come."""

import sys
import time
from collections.abc import Sequence

from flows.connectors.epochs import EpochPart, Flag, State
from flows.connectors.items import Hole, Raw
from flows.connectors.kafka_source import MergeSource
from flows.connectors.parts import MergePart
from schemas.replay import Range
from schemas.settings import Kafka

_PROGRESS_S = 2.0


class Progress:
    """Lines on standard output: how many messages of how many have been read, over all partitions."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[int, int, int]] = {}
        self._started = time.monotonic()
        self._due = self._started + _PROGRESS_S

    def note(self, part: str, first: int, position: int, end: int) -> None:
        """A partition has been read from `first` up to `position`, of `end`."""
        if first and part not in self._parts:
            self._say(f"{part} begins at offset {first}: what came before has expired")
        self._parts[part] = (first, position, end)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _PROGRESS_S
            self.show()

    def show(self) -> None:
        """Say how far it has come."""
        done = sum(position - first for first, position, _ in self._parts.values())
        total = sum(end - first for first, _, end in self._parts.values())
        self._say(f"{done:,} of {total:,} messages read, {time.monotonic() - self._started:.0f} s")

    def _say(self, text: str) -> None:
        sys.stdout.write(f"replay: {text}\n")
        sys.stdout.flush()


class ReplaySource(MergeSource):
    """As `MergeSource` with `stop_at_end`, and of its messages only those in `span`."""

    def __init__(
        self,
        kafka: Kafka,
        topics: Sequence[str],
        *,
        span: Range,
        progress: Progress,
        epoch_bytes: int,
        client_id: str,
        stop: Flag | None = None,
    ) -> None:
        self.span, self.progress = span, progress
        super().__init__(
            kafka,
            topics,
            epoch_bytes=epoch_bytes,
            skip_expired=False,
            client_id=client_id,
            stop_at_end=True,
            stop=stop,
        )

    def build_part(self, step_id: str, for_part: str, resume_state: State | None) -> EpochPart:
        """Read on where `resume_state` says."""
        return ReplayPart(self, for_part, resume_state)


class ReplayPart(MergePart):
    """One partition of a ReplaySource."""

    def __init__(self, source: ReplaySource, part: str, state: State | None) -> None:
        super().__init__(source, part, state)
        self._span, self._progress, self._data = source.span, source.progress, source.topics[0]
        self._first: int | None = None
        self._end = 0

    def pull(self, max_items: int, max_bytes: int) -> Sequence[Raw | Hole]:
        """What is in order, and in range."""
        items = super().pull(max_items, max_bytes)
        self._note(items)
        return [item for item in items if self._span.holds(item.topic, item.offset, item.timestamp)]

    def _note(self, items: Sequence[Raw | Hole]) -> None:
        read = [item for item in items if item.topic == self._data]
        if not read:
            return
        if self._first is None:
            self._first, self._end = read[0].offset, self._ends.poll()[1][self._data, self._lane]
        self._progress.note(self.part, self._first, read[-1].next_offset, max(self._end, read[-1].next_offset))
