"""Payloads of trajectories whose group is still open: a cache of this process before the log, which keeps them all."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from flows.steps.chunk import Chunk, Pack
from flows.steps.member import Coordinates, Member
from schemas import wire
from schemas.errors import ContractError

CACHE_BYTES = 16 * 1024 * 1024
"""Messages that one shard keeps at hand; what is beyond is read from Kafka again when its group closes."""


LEAST_RUN = 32
"""Rows that a slice should have on average, to be cheaper than a copy."""


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
            self.drop([next(iter(self._cache))])

    def drop(self, places: Iterable[Coordinates]) -> None:
        """Forget the messages at `places`, as far as they are kept."""
        for place in places if self._cache else ():
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


class Part(NamedTuple):
    """Payload of members [start, stop)."""

    start: int
    stop: int
    rows: pa.RecordBatch


def take(chunk: Chunk, members: Sequence[Member]) -> list[Part]:
    """The payload of `members`, all of which came with `chunk`, in their order."""
    starts = {(e.partition, e.offset): e.start for e in chunk.events if isinstance(e, Pack)}
    return _parts(chunk.rows, [starts[m.partition, m.offset] + m.row for m in members])


def take_kept(kept: Mapping[Coordinates, pa.RecordBatch], members: Sequence[Member]) -> list[Part]:
    """The payload of `members`, whose messages are in `kept`, in their order."""
    ends = accumulate(batch.num_rows for batch in kept.values())
    starts = dict(zip(kept, [0, *ends], strict=False))
    return _parts(pa.concat_batches(list(kept.values())), [starts[m.partition, m.offset] + m.row for m in members])


def _parts(batch: pa.RecordBatch, rows: list[int]) -> list[Part]:
    """Slices of `batch` where `rows` follow one another in long runs, for they cost nothing; else a copy."""
    jumps = np.flatnonzero(np.diff(rows) != 1) + 1
    if len(jumps) * LEAST_RUN > len(rows):
        return [Part(0, len(rows), batch.take(pa.array(rows, pa.int64())))]
    edges = [0, *jumps.tolist(), len(rows)]
    return [Part(a, b, batch.slice(rows[a], b - a)) for a, b in pairwise(edges)]
