"""Trajectories survive objects -> Arrow -> Kafka bytes -> Arrow -> objects, and nothing else gets in."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import wire
from schemas.errors import ContractError
from schemas.names import SCHEMA_VERSION, Header
from schemas.tables import TABLES
from schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory, from_batch, to_batch
from tests.strategies import trajectories

packs = st.lists(trajectories(), min_size=1, max_size=4)


@given(packs)
def test_objects_survive_arrow_and_kafka_bytes(pack: list[Trajectory]) -> None:
    body, headers = wire.pack(pack)
    assert from_batch(wire.decode(body)) == pack
    assert wire.header_int(headers, Header.NUM_ROWS, 0) == len(pack)
    assert wire.header_int(headers, Header.NUM_TOKENS, 0) == sum(len(t.token_ids) for t in pack)


@given(packs, st.data())
def test_a_flipped_byte_is_read_or_refused_but_never_crashes(pack: list[Trajectory], data: st.DataObject) -> None:
    body = bytearray(wire.pack(pack)[0])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        batch = wire.decode(bytes(body))
    except ContractError:
        return
    assert batch.schema.equals(TRAJECTORY_SCHEMA)


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_by_name(body: bytes) -> None:
    with pytest.raises(ContractError):
        wire.decode(body)


@given(packs)
def test_an_unknown_schema_version_is_refused_by_name(pack: list[Trajectory]) -> None:
    newer = to_batch(pack).replace_schema_metadata({"lagoon.schema_version": str(SCHEMA_VERSION + 1)})
    with pytest.raises(ContractError, match=f"schema version {SCHEMA_VERSION + 1}"):
        wire.decode(wire.encode(newer))


@given(packs)
def test_a_column_that_arrives_with_type_null_becomes_its_declared_type(pack: list[Trajectory]) -> None:
    batch = to_batch(pack)
    for name in ("error", "error_kind", "parent_id"):
        index = batch.schema.get_field_index(name)
        batch = batch.set_column(index, pa.field(name, pa.null()), pa.nulls(len(pack)))
    batch = batch.replace_schema_metadata(TRAJECTORY_SCHEMA.metadata)
    decoded = wire.decode(wire.encode(batch))
    assert decoded.schema.equals(TRAJECTORY_SCHEMA)
    assert decoded.column("error").null_count == len(pack)


@given(trajectories(), st.sampled_from(["trajectory_id", "token_ids", "started_at"]))
def test_a_missing_column_or_a_null_where_none_may_be_is_refused_by_name(trajectory: Trajectory, name: str) -> None:
    batch = to_batch([trajectory])
    index = batch.schema.get_field_index(name)
    missing = batch.drop_columns([name])
    nulled = batch.set_column(
        index, pa.field(name, TRAJECTORY_SCHEMA.field(name).type), pa.nulls(1, batch.column(index).type)
    )
    for bad in (missing, nulled.replace_schema_metadata(TRAJECTORY_SCHEMA.metadata)):
        with pytest.raises(ContractError, match=name):
            wire.decode(wire.encode(bad))


def test_no_rows_and_more_rows_than_a_pack_holds_are_refused() -> None:
    many = pa.RecordBatch.from_arrays([pa.nulls(17, f.type) for f in TRAJECTORY_SCHEMA], schema=TRAJECTORY_SCHEMA)
    for batch in (many, many.slice(0, 0)):
        with pytest.raises(ContractError, match="expected one of 1 to 16"):
            wire.decode(wire.encode(batch))


def test_every_column_is_documented_and_every_type_is_plain() -> None:
    plain = {
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.string(),
        pa.bool_(),
        pa.binary(),
        pa.timestamp("us", tz="UTC"),
    }
    for table in TABLES.values():
        for field in table.schema:
            assert field.metadata[b"doc"], f"{table.name}.{field.name}"
            if not pa.types.is_nested(field.type):
                assert field.type in plain, f"{table.name}.{field.name}"
        assert set(table.partition_by) <= set(table.schema.names)
        assert all(field.nullable for field in table.delta_schema)
