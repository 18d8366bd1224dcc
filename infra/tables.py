"""Delta tables made, and grown, to the shape that `schemas.tables` declares."""

from collections.abc import Mapping

import pyarrow as pa
from deltalake import DeltaTable, Field
from deltalake import Schema as DeltaSchema

from infra.staging import statistics_columns
from schemas.errors import LakeError
from schemas.tables import Table

STATISTICS_PROPERTY = "delta.dataSkippingStatsColumns"
"""Names the columns whose statistics every writer must give; readers then expect no others."""


LOG_PROPERTIES = {"delta.enableExpiredLogCleanup": "false"}
"""Commits are removed behind every reader by `infra.maintenance.logs` alone.

delta-rs removes old ones after each compaction and vacuum, whatever their `PostCommitHookProperties` say.
"""


def prepare(table: Table, uri: str, options: Mapping[str, str]) -> None:
    """Create `table` at `uri`, or add the columns and properties that it lacks there.

    One try: a concurrent change raises DeltaError.

    Raises:
        LakeError: newer code wrote it (unknown columns, other types or partitioning, a higher protocol).
    """
    if not DeltaTable.is_deltatable(uri, dict(options)):
        _create(table, uri, options)
    handle = DeltaTable(uri, storage_options=dict(options))
    _refuse_newer(table, handle)
    if missing := _missing(table, handle):
        handle.alter.add_columns(missing)
    if not LOG_PROPERTIES.items() <= handle.metadata().configuration.items():
        handle.alter.set_table_properties(LOG_PROPERTIES)


def promised_statistics(handle: DeltaTable) -> list[str] | None:
    """Columns whose statistics the table asks of its writers, or None where it does not say."""
    names = handle.metadata().configuration.get(STATISTICS_PROPERTY)
    return None if names is None else names.split(",")


def _create(table: Table, uri: str, options: Mapping[str, str]) -> None:
    DeltaTable.create(
        uri,
        table.delta_schema,
        mode="ignore",
        partition_by=list(table.partition_by),
        description=table.row,
        configuration={
            STATISTICS_PROPERTY: ",".join(statistics_columns(table)),
            "delta.checkpointInterval": "100",
            **LOG_PROPERTIES,
        },
        storage_options=dict(options),
    )


def _missing(table: Table, handle: DeltaTable) -> list[Field]:
    present = set(_schema(handle).names)
    return [f for f in DeltaSchema.from_arrow(table.delta_schema).fields if f.name not in present]


def _refuse_newer(table: Table, handle: DeltaTable) -> None:
    protocol = handle.protocol()
    if protocol.min_reader_version > 1 or protocol.min_writer_version > 2:
        raise LakeError(
            f"table {table.name} has protocol ({protocol.min_reader_version}, {protocol.min_writer_version}); this "
            "code keeps to (1, 2). A newer Lagoon or another engine has raised it: upgrade, or restore the table"
        )
    for field in _schema(handle):
        _refuse_field(table, field)
    if tuple(handle.metadata().partition_columns) != table.partition_by:
        raise LakeError(
            f"table {table.name} is partitioned by {handle.metadata().partition_columns}, expected {table.partition_by}"
        )


def _refuse_field(table: Table, field: pa.Field) -> None:
    if field.name not in table.schema.names:
        raise LakeError(f"table {table.name} has a column {field.name} that this code does not know; upgrade Lagoon")
    declared = DeltaSchema.from_arrow(pa.schema([pa.field(field.name, table.schema.field(field.name).type)]))
    expected = pa.schema(declared.to_arrow()).field(0).type
    if field.type != expected:
        raise LakeError(f"table {table.name}, column {field.name}: type {field.type}, expected {expected}")


def _schema(handle: DeltaTable) -> pa.Schema:
    return pa.schema(handle.schema().to_arrow())
