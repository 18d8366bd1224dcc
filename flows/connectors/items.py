"""What sources emit: messages, holes in a log, ticks and wall-clock readings. All are picklable and compare by value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Raw:
    """A Kafka message as it lies in the log.

    `topic` is the contract's name (without the run's prefix). `timestamp` is the broker's, in ms since 1970, raised to
    the largest one before it in its partition, so that it never goes back.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    value: bytes

    @property
    def num_bytes(self) -> int:
        """Size of the body."""
        return len(self.value)


@dataclass(frozen=True, slots=True)
class Hole:
    """Offsets [start, end) that had expired before they were read; emitted only where the settings allow to go on."""

    topic: str
    partition: int
    start: int
    end: int
    timestamp: int

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
