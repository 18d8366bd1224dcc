"""Payloads of trajectories whose group is still open: a cache of this process before the log, which keeps them all."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from flows.steps.chunk import Chunk, Pack
from flows.steps.member import Coordinates, Member
from schemas import wire
from schemas.errors import ContractError

CACHE_BYTES = 16 * 1024 * 1024
"""Messages that one shard keeps at hand; what is beyond is read from Kafka again when its group closes."""


class PayloadReader(Protocol):
    """Reads one message of `trajectories` again."""

    def read(self, partition: int, offset: int) -> bytes | None:
        """The body at `offset`, or None where the log has no such message any more."""
        ...


class Payloads:
    """Finds the payload of a member: in the chunk at hand, in the cache, or in the log."""

    def __init__(self, reader: PayloadReader, cache_bytes: int = CACHE_BYTES) -> None:
        self._reader, self._limit = reader, cache_bytes
        self._cache: dict[Coordinates, pa.RecordBatch] = {}
        self._bytes = 0

    def keep(self, pack: Pack) -> None:
        """Keep the message of `pack` for later, at the cost of the one kept longest."""
        if (pack.partition, pack.offset) in self._cache:
            return
        self._cache[pack.partition, pack.offset] = pack.batch
        self._bytes += pack.batch.nbytes
        while self._bytes > self._limit:
            self.drop(next(iter(self._cache)))

    def drop(self, place: Coordinates) -> None:
        """Forget the message at `place`, if it is kept."""
        batch = self._cache.pop(place, None)
        self._bytes -= batch.nbytes if batch else 0

    def find(self, place: Coordinates) -> pa.RecordBatch | None:
        """The message at `place`, kept or read again; None where the log has lost it."""
        if place not in self._cache:
            body = self._reader.read(*place)
            try:
                return None if body is None else wire.decode(body)
            except ContractError:
                return None
        return self._cache[place]


def take(chunk: Chunk, members: Sequence[Member]) -> pa.RecordBatch:
    """The payload rows of `members`, all of which came with `chunk`, in their order."""
    starts = {(e.partition, e.offset): e.start for e in chunk.events if isinstance(e, Pack)}
    return _rows(chunk.rows, [starts[m.place] + m.row for m in members])


def take_kept(kept: Mapping[Coordinates, pa.RecordBatch], members: Sequence[Member]) -> pa.RecordBatch:
    """The payload rows of `members`, whose messages are in `kept`, in their order."""
    starts: dict[Coordinates, int] = {}
    total = 0
    for place, batch in kept.items():
        starts[place] = total
        total += batch.num_rows
    return _rows(pa.concat_batches(list(kept.values())), [starts[m.place] + m.row for m in members])


def _rows(batch: pa.RecordBatch, rows: list[int]) -> pa.RecordBatch:
    return batch if rows == list(range(batch.num_rows)) else batch.take(pa.array(rows, pa.int64()))
