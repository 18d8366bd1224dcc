"""Trajectories as Kafka messages: an uncompressed Arrow IPC stream of one batch, and headers that count it.

The producer compresses whole Kafka batches, so bodies stay plain. Headers are counted even where a body cannot be read.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice

import pyarrow as pa

from schemas.errors import ContractError
from schemas.ids import shard_of
from schemas.ipc import refuse_unfolding
from schemas.names import SCHEMA_VERSION, Header
from schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory, to_batch

MAX_PACK = 16
"""Most trajectories in one message."""

MAX_SCHEMA_BYTES = 64 * 1024
"""A longer schema, documentation included, is refused."""

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

    Nothing is allocated that the body does not already hold, but for the bytes by which a cast widens a value: bodies
    that claim more than they carry (compressed, dictionary-encoded, overlapping) are refused before they are read.

    Raises:
        ContractError: not Arrow IPC, not exactly one batch, more than MAX_PACK rows, an unknown schema version,
            columns that the schema does not have, or a layout that could unfold to more than the body.
    """
    try:
        schema, message = _messages(body)
        refuse_unfolding(message.metadata.to_pybytes(), message.body.size)
        batch = pa.ipc.read_record_batch(message, schema)
        if not 1 <= batch.num_rows <= MAX_PACK:
            raise ContractError(f"a batch of {batch.num_rows} rows; expected one of 1 to {MAX_PACK}")
        batch.validate(full=True)
        if not schema.equals(TRAJECTORY_SCHEMA):
            _refuse_hollow_lists(batch, len(body))
        return conform(batch)
    except (pa.ArrowException, OSError, ValueError, OverflowError, EOFError) as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(f"not a trajectory message: {type(error).__name__}: {error}") from error


def _messages(body: bytes) -> tuple[pa.Schema, pa.Message]:
    """The schema and the one record batch, not yet read, of the stream in `body`."""
    found = list(islice(pa.ipc.MessageReader.open_stream(body), 3))
    kinds = [message.type for message in found]
    if kinds != ["schema", "record batch"]:
        raise ContractError(f"messages {kinds or 'none'}; expected a schema and one record batch")
    if found[0].metadata.size > MAX_SCHEMA_BYTES:
        raise ContractError(f"a schema of {found[0].metadata.size} bytes; expected at most {MAX_SCHEMA_BYTES}")
    return _schema(found[0].metadata.to_pybytes()), found[1]


@lru_cache(64)
def _schema(metadata: bytes) -> pa.Schema:
    """The schema in the metadata of a schema message; a producer sends the same one each time."""
    schema = pa.ipc.read_schema(pa.py_buffer(struct.pack("<Ii", 0xFFFFFFFF, len(metadata)) + metadata))
    version = int((schema.metadata or {}).get(_VERSION_KEY, b"0"))
    if not 1 <= version <= SCHEMA_VERSION:
        raise ContractError(f"trajectory schema version {version}; this reader knows 1 to {SCHEMA_VERSION}")
    if len(set(schema.names)) < len(schema.names):
        raise ContractError("a column comes twice")
    unfit = sorted(field.name for field in schema if not _is_plain(field.type))
    if unfit:
        raise ContractError(
            f"columns {unfit} are of types that can stand for more bytes than they take; expected "
            "numbers, texts, times, lists and structs"
        )
    return schema


def _is_plain(type_: pa.DataType) -> bool:
    """Whether each value takes its own bytes: no dictionaries, runs, views, unions or lists of a declared size."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return _is_plain(type_.value_type)
    if pa.types.is_struct(type_):
        return all(_is_plain(field.type) for field in type_)
    is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_)
    return is_text or pa.types.is_primitive(type_) or pa.types.is_null(type_)


def _refuse_hollow_lists(batch: pa.RecordBatch, num_bytes: int) -> None:
    """A list of nulls takes no bytes however long it says it is; as a list of numbers it would."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        if is_list and len(column.values) > num_bytes // 4:
            raise ContractError(f"column {name} lists {len(column.values)} values in a message of {num_bytes} bytes")


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
