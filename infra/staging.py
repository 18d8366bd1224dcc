"""Rows to Parquet files of a Delta table, written before they are committed.

A staged file has its final name and is on disk for good; nothing refers to it until a commit does.
"""

import io
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from obstore.store import ObjectStore

from infra.store import sync_path
from schemas.errors import LakeError
from schemas.tables import Table

Add = dict[str, Any]
"""A file to be committed, as JSON-able fields of a Delta `add` action."""


def statistics_columns(table: Table) -> list[str]:
    """Columns with minimum and maximum in the log: integers, times and ids.

    Floats stay out: NaN and infinity are not valid in Delta statistics. Long text would bloat the log.
    """
    return [f.name for f in table.schema if f.name not in table.partition_by and _has_statistics(f)]


def conform(table: Table, rows: pa.Table | list[dict[str, Any]]) -> pa.Table:
    """`rows` under the declared schema of `table`; types are declared, never inferred.

    Raises:
        LakeError: an unknown column, a missing or null value where the contract allows none, a wrong type.
    """
    schema = table.delta_schema
    names = {key for row in rows for key in row} if isinstance(rows, list) else set(rows.column_names)
    if unknown := sorted(names - set(schema.names)):
        raise LakeError(f"rows for {table.name} have unknown columns {unknown}; it has {schema.names}")
    try:
        if isinstance(rows, list):
            result = pa.Table.from_pylist(rows, schema=schema)
        else:
            result = pa.Table.from_arrays([_cast(rows, field) for field in schema], schema=schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise LakeError(f"rows for {table.name} do not fit its schema: {error}") from error
    _refuse_nulls(table, result)
    return result


def stage(
    store: ObjectStore, folder: Path | None, table: Table, columns: Sequence[str] | None, rows: pa.Table
) -> list[Add]:
    """Write `rows` as one file per partition and return their add actions.

    Args:
        store: root of the table.
        folder: the same root on this machine, or None for a remote store.
        table: declares partitioning.
        columns: columns whose statistics the Delta table promises; None: it promises none in particular, and then only
            the row count is safe (partial statistics make filters drop rows).
        rows: rows under `table.delta_schema`.
    """
    return [
        _stage_file(store, folder, values, columns, part)
        for values, part in _partitions(table.partition_by, rows)
        if part.num_rows
    ]


def _stage_file(
    store: ObjectStore,
    folder: Path | None,
    values: Mapping[str, str | None],
    columns: Sequence[str] | None,
    rows: pa.Table,
) -> Add:
    directory = "".join(f"{key}={quote(value or '__HIVE_DEFAULT_PARTITION__')}/" for key, value in values.items())
    path = f"{directory}part-{uuid.uuid4()}.zstd.parquet"
    size = _write_local(folder / path, rows) if folder is not None else _write_remote(store, path, rows)
    return {
        "path": quote(path, safe="/="),
        "size": size,
        "partition_values": dict(values),
        "modification_time": time.time_ns() // 1_000_000,
        "data_change": True,
        "stats": json.dumps(_statistics(rows, columns), ensure_ascii=False),
    }


def _write_local(path: Path, rows: pa.Table) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        _write_parquet(rows, temporary)
        sync_path(temporary)
        os.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk it would take the room of the next try
        raise
    sync_path(path.parent)
    return path.stat().st_size


def _write_remote(store: ObjectStore, path: str, rows: pa.Table) -> int:
    body = io.BytesIO()
    _write_parquet(rows, body)
    store.put(path, body.getvalue())
    return body.tell()


def _write_parquet(rows: pa.Table, where: Path | io.BytesIO) -> None:
    # token ids and logprobs do not repeat: a dictionary costs a third of the write speed and saves nothing
    dictionary = [f.name for f in rows.schema if not pa.types.is_nested(f.type) and not pa.types.is_floating(f.type)]
    pq.write_table(rows, where, compression="zstd", use_dictionary=dictionary)  # pyright: ignore[reportArgumentType]


def _partitions(by: Sequence[str], rows: pa.Table) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    if not by:
        yield {}, rows
        return
    keys = rows.select(list(by)).group_by(list(by), use_threads=False).aggregate([]).to_pylist()
    for key in keys:
        matches = [pc.field(n).is_null() if value is None else pc.field(n) == value for n, value in key.items()]
        part = rows if len(keys) == 1 else rows.filter(reduce(and_, matches))
        yield {name: None if value is None else str(value) for name, value in key.items()}, part.drop_columns(list(by))


def _statistics(rows: pa.Table, columns: Sequence[str] | None) -> dict[str, Any]:
    statistics: dict[str, Any] = {"numRecords": rows.num_rows}
    if columns is None or not all(c in rows.column_names and _has_statistics(rows.schema.field(c)) for c in columns):
        return statistics
    limits = {c: pc.call_function("min_max", [rows[c]]).as_py() for c in columns}
    statistics["minValues"] = {c: _json(v["min"]) for c, v in limits.items() if v["min"] is not None}
    statistics["maxValues"] = {c: _json(v["max"]) for c, v in limits.items() if v["max"] is not None}
    statistics["nullCount"] = {c: rows[c].null_count for c in columns}
    return statistics


def _json(value: Any) -> Any:
    """`value` as Delta writes it; times are cut to milliseconds, which readers allow for."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{value.microsecond // 1000:03d}Z"
    return value


def _has_statistics(field: pa.Field) -> bool:
    is_id = pa.types.is_string(field.type) and field.name.endswith("_id")
    return is_id or pa.types.is_integer(field.type) or pa.types.is_timestamp(field.type)


def _cast(rows: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    if field.name in rows.column_names:
        return rows[field.name].cast(field.type)
    return pa.chunked_array([pa.nulls(rows.num_rows, field.type)])


def _refuse_nulls(table: Table, rows: pa.Table) -> None:
    for field in table.schema:
        if not field.nullable and rows[field.name].null_count:
            raise LakeError(f"rows for {table.name} have {rows[field.name].null_count} nulls in {field.name}")
