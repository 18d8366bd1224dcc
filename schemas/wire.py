"""Trajectories as Kafka messages: an uncompressed Arrow IPC stream of one batch, and headers that count it.

The producer compresses whole Kafka batches, so bodies stay plain. Headers are counted even where a body cannot be read.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from schemas.errors import ContractError
from schemas.ids import shard_of
from schemas.names import SCHEMA_VERSION, Header
from schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory, to_batch

MAX_PACK = 16
"""Most trajectories in one message."""

_VERSION_KEY = b"lagoon.schema_version"


def encode(batch: pa.RecordBatch) -> bytes:
    """`batch` as an Arrow IPC stream of exactly one record batch, without the documentation of its columns."""
    bare = pa.schema([field.remove_metadata() for field in batch.schema], batch.schema.metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, bare) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=bare))
    return sink.getvalue().to_pybytes()


def decode(body: bytes) -> pa.RecordBatch:
    """The one record batch in `body`, its layout fully validated, cast to TRAJECTORY_SCHEMA.

    Raises:
        ContractError: not Arrow IPC, not exactly one batch, more than MAX_PACK rows, an unknown schema version,
            or columns that the schema does not have.
    """
    try:
        with pa.ipc.open_stream(body) as reader:
            version = int((reader.schema.metadata or {}).get(_VERSION_KEY, b"0"))
            if not 1 <= version <= SCHEMA_VERSION:
                raise ContractError(f"trajectory schema version {version}; this reader knows 1 to {SCHEMA_VERSION}")
            batches = list(reader)
        if len(batches) != 1 or not 1 <= batches[0].num_rows <= MAX_PACK:
            raise ContractError(
                f"{len(batches)} batches of {[b.num_rows for b in batches]} rows; expected one of 1 to {MAX_PACK}"
            )
        batch = batches[0]
        batch.validate(full=True)
        return conform(batch)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(f"not a trajectory message: {type(error).__name__}: {error}") from error


def conform(batch: pa.RecordBatch) -> pa.RecordBatch:
    """`batch` under TRAJECTORY_SCHEMA: columns in order, null-typed and missing nullable columns filled.

    Raises:
        ContractError: an unknown column, a missing one that may not be null, nulls where none may be, a wrong type.
    """
    if batch.schema.equals(TRAJECTORY_SCHEMA):
        columns = batch.columns
    else:
        unknown = set(batch.schema.names) - set(TRAJECTORY_SCHEMA.names)
        if unknown:
            raise ContractError(f"unknown columns {sorted(unknown)}")
        columns = [_column(batch, f) for f in TRAJECTORY_SCHEMA]
    for field, values in zip(TRAJECTORY_SCHEMA, columns, strict=True):
        if values.null_count and not field.nullable:
            raise ContractError(f"column {field.name} has {values.null_count} nulls; it may have none")
    return pa.RecordBatch.from_arrays(columns, schema=TRAJECTORY_SCHEMA)


def _column(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    index = batch.schema.get_field_index(field.name)
    if index >= 0:
        return batch.column(index).cast(field.type)
    if not field.nullable:
        raise ContractError(f"column {field.name} is missing")
    return pa.nulls(batch.num_rows, field.type)


def pack(trajectories: Sequence[Trajectory]) -> tuple[bytes, dict[str, bytes]]:
    """Body and headers of one message that holds `trajectories` (1 to MAX_PACK of them)."""
    if not 1 <= len(trajectories) <= MAX_PACK:
        raise ContractError(f"{len(trajectories)} trajectories in a pack; expected 1 to {MAX_PACK}")
    num_tokens = sum(len(t.token_ids) for t in trajectories)
    headers = counting_headers(len(trajectories), num_tokens)
    headers[Header.SHARD] = str(shard_of(trajectories[0].task_id)).encode()
    return encode(to_batch(trajectories)), headers


def counting_headers(num_rows: int, num_tokens: int) -> dict[str, bytes]:
    """The headers by which a message counts, readable or not."""
    return {
        Header.SCHEMA_VERSION: str(SCHEMA_VERSION).encode(),
        Header.NUM_ROWS: str(num_rows).encode(),
        Header.NUM_TOKENS: str(num_tokens).encode(),
    }


def header_int(headers: Mapping[str, bytes | None], name: str, default: int) -> int:
    """The non-negative integer in header `name`, or `default` where it is absent or not one."""
    value = headers.get(name) or b""
    return int(value) if value.isdigit() and len(value) < 19 else default
