"""The independent record: what was made and what must become of it, written before anything is handed over.

JSON lines, one per trajectory, in the order in which the outbox gets them.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class Fate(StrEnum):
    """What must become of a trajectory: an admission outcome, or a dead letter."""

    ADMITTED = "admitted"
    STALE = "stale"
    DUPLICATE = "duplicate"
    NO_SIGNAL = "no_signal"
    INVALID = "invalid"
    DEAD_LETTER = "dead_letter"


@dataclass(frozen=True, slots=True)
class Entry:
    """A trajectory of the record. `tokens` counts them; `number`, `kind` and `version` are enough to make it again."""

    trajectory_id: str
    group_id: str
    group_index: int
    tokens: int
    fate: Fate
    number: int = 0
    kind: str = ""
    version: int = 0


class Journal:
    """The record in `path`, appended to; one process at a time. A torn last line of an earlier life is cut off."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        whole = _whole(os.pread(self._file, os.fstat(self._file).st_size, 0))
        os.ftruncate(self._file, len(whole))
        os.lseek(self._file, 0, os.SEEK_END)
        self.entries = [_entry(line) for line in whole.splitlines()]

    def append(self, entries: Sequence[Entry]) -> None:
        """Write `entries` down; on return they survive the machine."""
        os.write(self._file, b"".join(json.dumps(asdict(e)).encode() + b"\n" for e in entries))
        os.fsync(self._file)
        self.entries += entries

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def read(path: Path) -> Iterator[Entry]:
    """The entries in `path`, in order; a torn last line is no entry."""
    return map(_entry, _whole(path.read_bytes()).splitlines())


def _whole(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _entry(line: bytes) -> Entry:
    fields = json.loads(line)
    return Entry(**fields | {"fate": Fate(fields["fate"])})
