"""Rows of `dead_letters`: messages that nobody can read, their return, and holes in a log."""

import json

import pyarrow as pa

from flows.connectors.items import Hole, Raw
from schemas.names import Header
from schemas.replay import REPLAYED, origin_of
from schemas.tables import DEAD_LETTERS
from schemas.topics import TRAJECTORIES
from schemas.wire import MAX_PACK, header_int


def undecodable(raw: Raw, error: str) -> pa.RecordBatch:
    """The row that keeps `raw` byte for byte, with why it could not be read."""
    num_rows, num_tokens = _counts(raw)
    return _row(
        raw,
        key=raw.key,
        value=raw.value,
        headers=json.dumps([[name, value.hex()] for name, value in raw.headers]),
        error=error,
        num_rows=num_rows,
        num_tokens=num_tokens,
        kind="undecodable",
        replayed_from=replayed_from(raw),
    )


def replayed(raw: Raw, letter: str) -> pa.RecordBatch:
    """The row that tells that `letter` was sent again as `raw`, and read. Its trajectories count as any others."""
    return _row(
        raw,
        key=raw.key,
        value=None,
        headers=json.dumps([[name, value.hex()] for name, value in raw.headers]),
        error="",
        num_rows=0,
        num_tokens=0,
        kind="replayed",
        replayed_from=letter,
    )


def _counts(raw: Raw) -> tuple[int, int]:
    """Trajectories and tokens by the headers of `raw`. They may lie, but no message holds more than this."""
    if raw.topic != TRAJECTORIES.name:
        return 0, 0
    headers = dict(raw.headers)
    num_rows = min(max(header_int(headers, Header.NUM_ROWS, 1), 1), MAX_PACK)
    return num_rows, min(header_int(headers, Header.NUM_TOKENS, 0), raw.body_bytes)


def replayed_from(raw: Raw) -> str | None:
    """The letter that `raw` sends again, or None."""
    value = dict(raw.headers).get(REPLAYED)
    return origin_of(value, raw.partition, raw.offset) if raw.topic == TRAJECTORIES.name else None


def hole(gap: Hole) -> pa.RecordBatch:
    """The row that tells of offsets nobody read. What they held is unknown, so each message counts as one row."""
    start, end = gap.offset, gap.next_offset
    return _row(
        gap,
        key=None,
        value=None,
        headers=json.dumps({"start": start, "end": end, "num_messages": end - start}),
        error=f"offsets [{start},{end}) of {gap.topic}/{gap.partition} had expired before they were read",
        num_rows=end - start if gap.topic == TRAJECTORIES.name else 0,
        num_tokens=0,
        kind="hole",
        replayed_from=None,
    )


def _row(item: Raw | Hole, **cells: object) -> pa.RecordBatch:
    cells |= {"topic": item.topic, "partition": item.partition, "offset": item.offset, "at": item.timestamp * 1000}
    return pa.RecordBatch.from_arrays(
        [pa.array([cells[f.name]], f.type) for f in DEAD_LETTERS.schema], schema=DEAD_LETTERS.schema
    )
