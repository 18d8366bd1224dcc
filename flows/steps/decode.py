"""Messages of one shard become one chunk; what nobody can read becomes a dead letter."""

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from flows.connectors.dead_letters import hole, replayed, replayed_from, undecodable
from flows.connectors.items import Hole, Raw
from flows.steps.chunk import Chunk, Note, Pack
from schemas import messages, wire
from schemas.errors import ContractError
from schemas.names import Header
from schemas.topics import TRAJECTORIES, WEIGHTS
from schemas.trajectory import TRAJECTORY_SCHEMA

MAX_OUTBOXES = 4096
"""Outboxes whose last sequence number a shard remembers; the one that was silent longest goes first."""

MAX_OUTBOX_LENGTH = 256
"""A longer name is none, or those that are remembered would have no bound."""

Sequences = dict[str, int]
"""Last sequence number by outbox. Each outbox numbers its messages upwards, so nothing else need be remembered."""

Body = Callable[[Mapping[str, bytes | None], bytes], bytes]
"""(headers, value) of a message -> its body; raises ContractError where it cannot be had."""

_NO_ROWS = pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in TRAJECTORY_SCHEMA], schema=TRAJECTORY_SCHEMA)


def carried(headers: Mapping[str, bytes | None], value: bytes) -> bytes:
    """The body of a message that carries it; claims are refused.

    Raises:
        ContractError: a claim.
    """
    if headers.get(Header.CLAIM) is not None:
        raise ContractError("a claim, and there is no store of claims")
    return value


def decode(shard: int, items: Sequence[Raw | Hole], sequences: Sequences, body: Body = carried) -> Chunk:
    """The chunk that `items` make, in order. `sequences` is brought up to date; `body` fetches what one claims."""
    events: list[Pack | Note] = []
    dead: list[pa.RecordBatch] = []
    start = 0
    for item in items:
        if isinstance(item, Hole):
            dead.append(hole(item))
        elif item.topic != TRAJECTORIES.name:
            _decode_note(shard, item, events, dead)
        else:
            redelivered = _seen_before(item, sequences)
            pack = _decode_pack(item, start, redelivered, dead, body)
            if pack:
                events.append(pack)
                start = pack.stop
    batches = [event.batch for event in events if isinstance(event, Pack)]
    rows = pa.concat_batches(batches) if batches else _NO_ROWS
    return Chunk(shard, rows, tuple(events), tuple(dead))


def _decode_pack(raw: Raw, start: int, redelivered: bool, dead: list[pa.RecordBatch], body: Body) -> Pack | None:
    try:
        batch = wire.decode(body(dict(raw.headers), raw.value))
    except ContractError as error:
        if not redelivered:  # the first delivery lies in dead_letters; counting it twice would break conservation
            dead.append(undecodable(raw, str(error)))
        return None
    letter = replayed_from(raw)
    if letter and not redelivered:
        dead.append(replayed(raw, letter))
    return Pack(start, start + batch.num_rows, raw.timestamp, raw.partition, raw.offset, redelivered, batch)


def _decode_note(shard: int, raw: Raw, events: list[Pack | Note], dead: list[pa.RecordBatch]) -> None:
    type_ = messages.WeightSummary if raw.topic == WEIGHTS.name else messages.Directive
    try:
        events.append(Note(raw.timestamp, messages.decode(type_, raw.value)))
    except ContractError as error:
        if shard == 0:  # every shard sees it; one row is enough
            dead.append(undecodable(raw, str(error)))


def _seen_before(raw: Raw, sequences: Sequences) -> bool:
    headers = dict(raw.headers)
    outbox = headers.get(Header.OUTBOX, b"").decode("utf-8", "replace")
    sequence = wire.header_int(headers, Header.SEQUENCE, -1)
    if not 0 < len(outbox) <= MAX_OUTBOX_LENGTH or sequence < 0:
        return False
    last = sequences.pop(outbox, -1)
    sequences[outbox] = max(last, sequence)
    if len(sequences) > MAX_OUTBOXES:
        del sequences[next(iter(sequences))]
    return sequence <= last
