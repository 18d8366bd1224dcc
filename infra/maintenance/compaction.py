"""Compaction: the many small files of a partition become few large ones, while others append and read.

The commit says that no data changed, so a tail delivers nothing of it, and appends beside it do not conflict with it.
"""

from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import ColumnProperties, DeltaTable, WriterProperties

from infra.lake import Lake

SMALL = 0.5
"""Files below this share of the target size count as small."""

RESTED = timedelta(hours=1)
"""A partition that got no file for so long rests: of a version that nobody samples any more, for example."""


def open_table(lake: Lake, name: str) -> DeltaTable:
    """A handle of its own on the newest version of a table."""
    return DeltaTable(lake.table_uri(name), storage_options=lake.storage_options)


def compact(lake: Lake, name: str, min_files: int, target_bytes: int, now: datetime, stopped: Callable[[], Any]) -> int:
    """Merge small files, partition by partition, where one has more than `min_files` of them, or rests and has two.

    Args:
        lake: where the table is.
        name: the table.
        min_files: small files that a partition may have while it is written to.
        target_bytes: size of the merged files.
        now: the time.
        stopped: asked before each partition; true ends the work early.

    Returns:
        Files that were merged into larger ones.

    Raises:
        DeltaError: another process rewrites the same files; nothing has changed in that partition.
    """
    handle, merged = open_table(lake, name), 0
    for partition in crowded(handle, min_files, target_bytes, now):
        if stopped():
            break
        merged += _compact_partition(handle, partition, target_bytes)
        handle.update_incremental()
    return merged


def crowded(handle: DeltaTable, min_files: int, target_bytes: int, now: datetime) -> list[tuple[str, ...]]:
    """Partitions, by their values, with more than `min_files` files below SMALL of `target_bytes`.

    Of one that got no file for RESTED more than one is too many: nothing else would ever merge them.
    """
    columns = handle.metadata().partition_columns
    files = pa.table(handle.get_add_actions(flatten=True))
    values = [files[f"partition.{column}"].to_pylist() for column in columns]
    partitions = list(zip(*values, strict=True)) if columns else [()] * files.num_rows
    sizes, times = files["size_bytes"].to_pylist(), files["modification_time"].to_pylist()
    small = Counter(p for p, size in zip(partitions, sizes, strict=True) if size < SMALL * target_bytes)
    rested_ms = (now - RESTED).timestamp() * 1000
    busy = {p for p, at_ms in zip(partitions, times, strict=True) if at_ms > rested_ms}
    many = [p for p, count in small.items() if count > (min_files if p in busy else 1)]
    return [tuple(map(str, p)) for p in many if None not in p]


def _compact_partition(handle: DeltaTable, partition: tuple[str, ...], target_bytes: int) -> int:
    columns = handle.metadata().partition_columns
    metrics = handle.optimize.compact(
        partition_filters=[(column, "=", value) for column, value in zip(columns, partition, strict=True)] or None,
        target_size=target_bytes,
        max_concurrent_tasks=1,
        # as staged files: a dictionary on token ids and logprobs costs a third of the write speed and saves nothing
        writer_properties=WriterProperties(
            compression="ZSTD", default_column_properties=ColumnProperties(dictionary_enabled=False)
        ),
    )
    return int(metrics["numFilesRemoved"])
