"""A log of framed records in numbered files: appended to, read back after a crash, dropped from the front.

A frame is (payload bytes, CRC-32, kind, payload). Each file starts with a header record that says where everything
stood when it was begun, so that the files before it can go. What cannot be read is cut off, set aside and named, never
skipped in silence. The folder belongs to one process at a time.
"""

import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import LagoonError

_FRAME = struct.Struct("<IIB")

HEADER = 0
"""Kind of the record that starts a file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record's payload lies."""

    segment: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record as read back."""

    kind: int
    payload: bytes
    place: Place


class SegmentLog:
    """The log in `folder`. Read it back with `recover` once, then append.

    Attributes:
        damage: What cannot be read, and where `set_aside` keeps it, in words; empty when everything could be read.
    """

    def __init__(self, folder: Path, segment_bytes: int, header: Callable[[], bytes]) -> None:
        """`header` gives the payload that starts a new file.

        Raises:
            LagoonError: another process holds the folder.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.damage: list[str] = []
        self._damaged: dict[int, int] = {}
        self._folder, self._segment_bytes, self._header = folder, segment_bytes, header
        self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise LagoonError(
                f"outbox {folder} is held by another process; stop it, or use another instance"
            ) from error
        self._sizes: dict[int, int] = {}
        self._active, self._file, self._dirty = 0, -1, False

    @property
    def num_bytes(self) -> int:
        """Bytes in all files."""
        return sum(self._sizes.values())

    @property
    def segments(self) -> list[int]:
        """Numbers of the files, oldest first; the last one is appended to."""
        return list(self._sizes)

    def recover(self) -> Iterator[Record]:
        """Every readable record, oldest first; afterwards the log can be appended to, with `damage` after a `roll`."""
        for segment in sorted(int(p.stem) for p in self._folder.glob("*.log")):
            body = self._path(segment).read_bytes()
            records, good = _scan(body, segment)
            if not body:  # begun, and killed before its header was written
                self._path(segment).unlink()
            elif good < len(body):
                self._note_damage(segment, good, len(body))
            if good:
                self._sizes[segment] = good
                yield from records
        if self._sizes:
            self._open(max(self._sizes))

    def append(self, kind: int, payload: bytes) -> Place:
        """Write a record; it survives the process at once, and the machine after `sync`."""
        if self._file < 0 or self._sizes[self._active] >= self._segment_bytes:
            self.roll()
        return self._write(kind, payload)

    def roll(self) -> None:
        """Begin a new file, with a header of now."""
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file = -1
        self._open(self._next_number())
        try:
            self._write(HEADER, self._header())
        except OSError:
            self._abandon()
            raise
        self._sync_folder()

    def set_aside(self) -> None:
        """Move what cannot be read into files of its own. A header that was written before knows of it."""
        self.sync()
        for segment, good in self._damaged.items():
            path = self._path(segment)
            self._aside(segment, good).write_bytes(path.read_bytes()[good:])
            if good:
                os.truncate(path, good)
            else:
                path.unlink()
        self._damaged.clear()
        self._sync_folder()

    def read(self, place: Place) -> bytes:
        """The payload at `place`."""
        with self._path(place.segment).open("rb") as file:
            file.seek(place.offset)
            return file.read(place.num_bytes)

    def sync(self) -> None:
        """Make what was appended survive the machine too."""
        if self._dirty:
            os.fsync(self._file)
            self._dirty = False

    def drop_first(self) -> None:
        """Remove the oldest file; the one that is appended to stays."""
        segment = self.segments[0]
        if segment != self._active:
            self._path(segment).unlink()
            del self._sizes[segment]

    def close(self) -> None:
        """Sync, and let another process have the folder."""
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file = -1
        os.close(self._lock)

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}.log"

    def _open(self, segment: int) -> None:
        self._file = os.open(self._path(segment), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        self._active = segment
        self._sizes.setdefault(segment, 0)

    def _next_number(self) -> int:
        """Above every file that was ever here, so that a file set aside is never overwritten."""
        return max((int(p.name[:8]) for p in self._folder.glob("[0-9]*")), default=0) + 1

    def _abandon(self) -> None:
        """Remove the file that was begun: without its header nothing in it would count. The next append tries again."""
        os.close(self._file)
        self._file = -1
        self._path(self._active).unlink()
        del self._sizes[self._active]

    def _write(self, kind: int, payload: bytes) -> Place:
        frame = _FRAME.pack(len(payload), _checksum(kind, payload), kind) + payload
        start = self._sizes[self._active]
        try:
            written = os.write(self._file, frame)
            if written != len(frame):
                raise OSError(errno.ENOSPC, f"{written} of {len(frame)} bytes written", str(self._path(self._active)))
        except OSError:
            os.ftruncate(self._file, start)
            raise
        self._sizes[self._active] = start + len(frame)
        self._dirty = True
        return Place(self._active, start + _FRAME.size, len(payload))

    def _note_damage(self, segment: int, good: int, num_bytes: int) -> None:
        path, aside = self._path(segment), self._aside(segment, good)
        self._damaged[segment] = good
        self.damage.append(f"{path.name}: {num_bytes - good} bytes from {good} on are unreadable, kept as {aside.name}")

    def _aside(self, segment: int, good: int) -> Path:
        return self._path(segment).with_suffix(f".corrupt-{good}")

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def _scan(body: bytes, segment: int) -> tuple[list[Record], int]:
    """The records of a file up to the first that is cut short or altered, and the bytes that they take.

    A file that does not start with a header says nothing about what came before it: none of it counts.
    """
    records: list[Record] = []
    offset = 0
    while offset + _FRAME.size <= len(body):
        size, checksum, kind = _FRAME.unpack_from(body, offset)
        start = offset + _FRAME.size
        payload = body[start : start + size]
        if len(payload) < size or _checksum(kind, payload) != checksum or (not records and kind != HEADER):
            break
        records.append(Record(kind, payload, Place(segment, start, size)))
        offset = start + size
    return records, offset


def _checksum(kind: int, payload: bytes) -> int:
    return zlib.crc32(payload, kind)
