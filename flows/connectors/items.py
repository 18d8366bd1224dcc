"""What sources emit: messages, holes in a log, ticks, wall-clock readings. All can be pickled and compare by value."""

from dataclasses import dataclass

from schemas.claims import claimed_bytes


@dataclass(frozen=True, slots=True)
class Raw:
    """A Kafka message as it lies in the log.

    `topic` is the contract's name (without the run's prefix). `timestamp` is the broker's, in ms since 1970, raised to
    the largest one before it in its partition, so that it never goes back there. `lane` is the source partition that
    emitted it: messages of a side topic are emitted once in each lane.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    value: bytes
    lane: int = 0

    @property
    def next_offset(self) -> int:
        """Where to read on after this message."""
        return self.offset + 1

    @property
    def body_bytes(self) -> int:
        """Size of the body, wherever it lies."""
        return len(self.value) + claimed_bytes(self.headers)

    @property
    def num_bytes(self) -> int:
        """Size of key, headers and body."""
        named = sum(len(name) + len(value) for name, value in self.headers)
        return len(self.key or b"") + named + self.body_bytes


@dataclass(frozen=True, slots=True)
class Hole:
    """Offsets [offset, next_offset) that had expired before they were read; emitted where settings allow to go on."""

    topic: str
    partition: int
    offset: int
    next_offset: int
    timestamp: int
    lane: int = 0

    @property
    def num_bytes(self) -> int:
        """A hole has no body."""
        return 0


@dataclass(frozen=True, slots=True)
class Tick:
    """First item of every epoch of every source partition.

    A source enters epoch E+1 only after epoch E is durable on all workers, so a tick is the signal to commit. Route it
    through stateless steps only: an item that a timer emits proves nothing.
    """


@dataclass(frozen=True, slots=True)
class Clock:
    """Wall-clock time in ms since 1970, read at the source boundary."""

    now_ms: int
