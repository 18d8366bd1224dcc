"""Following a Delta table: the rows of each data-changing commit, in order, each once.

Compaction and deletes rewrite files without bringing rows: their commits are passed over.
"""

import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from infra.delta_log import Action
from infra.lake import Lake
from infra.store import local_path
from schemas.errors import LakeError
from schemas.tables import TABLES

Wanted = Callable[[Mapping[str, str | None]], bool]
"""Whether a file is to be read, by its partition values."""


class Tail:
    """A cursor on the commits of `table` after `after_version`; -1 begins with the first row ever.

    `version` is the last version delivered; keep it in a checkpoint and hand it back as `after_version` to go on.
    `num_passed_over` counts rows of files that the caller did not want.
    """

    def __init__(self, lake: Lake, table: str, after_version: int = -1, columns: list[str] | None = None):
        self.num_passed_over = 0
        declared = TABLES[table].delta_schema
        names = declared.names if columns is None else columns
        self.version = after_version
        self.schema = pa.schema([declared.field(name) for name in names])
        self._lake = lake
        self._table = table
        self._log = lake.log(table)
        self._store = lake.store(table)
        self._folder = local_path(lake.table_uri(table))

    def poll(self, max_versions: int = 100, wanted: Wanted | None = None) -> list[tuple[int, pa.Table]]:
        """Up to `max_versions` new versions that brought rows, as (Delta version, its rows).

        Files whose partition values are not `wanted` are not opened.

        The cursor moves only past commits that were read whole. A reader that begins at -1 where early commits have
        been cleaned away gets all rows of the newest snapshot at once, under that snapshot's version.

        Raises:
            LakeError: a commit after the cursor, or one of its files, is missing; the cursor stays before it.
        """
        found: list[tuple[int, pa.Table]] = []
        while len(found) < max_versions:
            version = self.version + 1
            actions = self._lake.retry(self._reading(version), partial(self._log.commit, version))
            if actions is None:
                if not found and self._lake.retry(self._reading(version), partial(self._is_gap, version)):
                    return self._after_gap(version)
                break
            if adds := self._wanted(_new_files(actions), wanted):
                found.append((version, self._lake.retry(self._reading(version), partial(self._read, adds))))
            self.version = version
        return found

    def _reading(self, version: int) -> str:
        return f"{self._table}: reading version {version}"

    def _is_gap(self, version: int) -> bool:
        """Whether commit `version` is missing though later ones exist."""
        last = self._log.checkpoint()
        later = self._log.exists(version + 1) or (last is not None and last["version"] >= version)
        return later and not self._log.exists(version)

    def _after_gap(self, version: int) -> list[tuple[int, pa.Table]]:
        if version == 0:
            self.version, rows = self._lake.retry(f"{self._table}: reading its snapshot", self._snapshot)
            return [(self.version, rows)] if rows.num_rows else []
        raise LakeError(
            f"{self._table}: commit {version} is missing though later ones exist, so its rows cannot be read. Restore "
            f"_delta_log/{version:020d}.json, or begin again with after_version=-1 to read the snapshot"
        )

    def _snapshot(self) -> tuple[int, pa.Table]:
        handle = DeltaTable(self._lake.table_uri(self._table), storage_options=self._lake.storage_options)
        rows = handle.to_pyarrow_dataset().to_table(columns=self.schema.names)
        return handle.version(), rows.cast(self.schema)

    def _wanted(self, adds: list[Action], wanted: Wanted | None) -> list[Action]:
        if wanted is None:
            return adds
        chosen = [add for add in adds if wanted(add["partitionValues"])]
        others = [json.loads(add["stats"]) for add in adds if add not in chosen and add.get("stats")]
        self.num_passed_over += sum(stats["numRecords"] for stats in others)
        return chosen

    def _read(self, adds: list[Action]) -> pa.Table:
        return pa.concat_tables([self._read_file(add) for add in adds])

    def _read_file(self, add: Action) -> pa.Table:
        path = unquote(add["path"])
        try:
            with pq.ParquetFile(self._open(path)) as file:
                present = set(file.schema_arrow.names)
                rows = file.read([n for n in self.schema.names if n in present], use_threads=False)
                length = file.metadata.num_rows
        except FileNotFoundError as error:
            raise LakeError(
                f"{self._table}: file {path} was removed before it was read; "
                "this reader lags behind the vacuum retention, or the file was deleted by hand"
            ) from error
        columns = [_column(f, rows, add["partitionValues"], length) for f in self.schema]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _open(self, path: str) -> Any:
        if self._folder is not None:
            return self._folder / path
        return io.BytesIO(bytes(self._store.get(path).bytes()))


def _new_files(actions: list[Action]) -> list[Action]:
    """Files that bring rows. With a data-changing remove beside them they are a rewrite (DELETE), not news."""
    if any(a["remove"].get("dataChange", True) for a in actions if "remove" in a):
        return []
    return [a["add"] for a in actions if "add" in a and a["add"]["dataChange"]]


def _column(field: pa.Field, rows: pa.Table, partition: dict[str, Any], length: int) -> pa.Array | pa.ChunkedArray:
    if field.name in rows.column_names:
        return rows[field.name].cast(field.type)
    value = partition.get(field.name)
    return pa.repeat(pa.scalar(value, pa.string()).cast(field.type), length)
