"""What a message may not unfold to: refused before anything is allocated."""

import re

import pyarrow as pa
import pytest

from schemas.errors import ContractError
from schemas.trajectory import TRAJECTORY_SCHEMA, to_batch
from schemas.wire import MAX_SCHEMA_BYTES, decode
from tests.samples import group

BATCH = to_batch(group("a", [0.0, 1.0]))
MIB = 1024 * 1024


def stream(batch: pa.RecordBatch, times: int = 1, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for _ in range(times):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def with_column(name: str, values: pa.Array) -> pa.RecordBatch:
    index = TRAJECTORY_SCHEMA.get_field_index(name)
    return BATCH.set_column(index, pa.field(name, values.type), values)


def refused(body: bytes, why: str) -> int:
    """The most memory that Arrow took while it refused `body`, in bytes."""
    usual, pool = pa.default_memory_pool(), pa.system_memory_pool()
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(ContractError, match=re.escape(why)):
            decode(body)
        return pool.max_memory() or 0
    finally:
        pa.set_memory_pool(usual)


def test_a_plain_message_is_read() -> None:
    assert decode(stream(BATCH)).equals(BATCH)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_compressed_body_is_refused_before_it_is_unpacked(codec: str) -> None:
    text = pa.array(["x" * 32 * MIB] * 2)
    body = stream(with_column("messages", text), compression=codec)
    assert len(body) < MIB
    assert refused(body, "compressed") < MIB


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["x", "x"]).dictionary_encode(),
        pa.array(["x", "x"], pa.string_view()),
        pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array(["x"])),
        pa.array([[1], [2]], pa.list_view(pa.int32())),
        pa.array([[None], [None]], pa.list_(pa.null(), 1)),
    ],
    ids=["dictionary", "view", "runs", "list view", "fixed list"],
)
def test_types_whose_values_share_bytes_are_refused(values: pa.Array) -> None:
    why = "messages" if pa.types.is_dictionary(values.type) else "can stand for more bytes"
    refused(stream(with_column("messages", values)), why)


@pytest.mark.parametrize("value", [pa.null(), pa.struct([("reward", pa.null())])], ids=["nulls", "structs of nulls"])
def test_a_list_that_takes_no_bytes_may_not_be_long(value: pa.DataType) -> None:
    num_values = 2**31 - 1
    nulls = pa.nulls(num_values)
    child = pa.StructArray.from_arrays([nulls], ["reward"]) if pa.types.is_struct(value) else nulls
    lists = pa.ListArray.from_arrays(pa.array([0, 1, num_values], pa.int32()), child)
    body = stream(with_column("turns", lists))
    assert len(body) < MIB
    assert refused(body, f"column turns lists {num_values} values") < MIB


def test_an_empty_list_may_be_of_nulls() -> None:
    nulls = pa.ListArray.from_arrays(pa.array([0, 0, 0], pa.int32()), pa.nulls(0))
    assert decode(stream(with_column("rewards", nulls))).equals(BATCH)


def test_columns_that_are_null_in_every_row_may_come_without_their_type() -> None:
    """A producer that infers types sends them as Arrow's null type (https://github.com/delta-io/delta-rs/issues/3891)."""
    batch = BATCH
    for name in ("error", "error_kind", "parent_id"):
        index = batch.schema.get_field_index(name)
        batch = batch.set_column(index, pa.field(name, pa.null()), pa.nulls(2))
    assert decode(stream(batch)).equals(BATCH)


def test_buffers_that_overlap_are_refused() -> None:
    """A text of 8,209 bytes is declared to reach over the whole body, and with it over the buffers of others."""
    body = stream(with_column("messages", pa.array(["x" * 4104, "x" * 4105])))
    place = body.index((8209).to_bytes(8, "little"))  # the metadata come before the offsets
    longer = body[:place] + (12_000).to_bytes(8, "little") + body[place + 8 :]
    refused(longer, "they overlap")


def test_two_batches_none_and_a_lone_schema_are_refused() -> None:
    refused(stream(BATCH, times=2), "expected a schema and one record batch")
    refused(stream(BATCH, times=0), "expected a schema and one record batch")
    refused(b"", "none")


def test_a_column_that_comes_twice_is_refused() -> None:
    twice = BATCH.append_column(pa.field("error", pa.string()), pa.array(["a", "b"]))
    refused(stream(twice), "a column comes twice")


def test_a_schema_beyond_its_bound_is_refused() -> None:
    metadata = {**(TRAJECTORY_SCHEMA.metadata or {}), b"note": b"x" * MAX_SCHEMA_BYTES}
    refused(stream(BATCH.replace_schema_metadata(metadata)), "a schema of")
