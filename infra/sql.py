"""The lake as SQL: every table, and every view of `infra/views`, in an in-memory DuckDB.

A connection shows the lake as it was when it was opened; who asks again and again keeps one, in `Live`.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from infra.lake import Lake
from infra.retries import reason
from schemas.errors import LakeError
from schemas.settings import Cost
from schemas.tables import TABLES, Table

VIEWS = Path(__file__).with_name("views")


def connect(
    lake: Lake, accelerator_hour: float = Cost().accelerator_hour, max_staleness: int | None = None
) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with the lake's tables and views.

    A table that does not exist yet is empty; a column that an older table lacks is null.

    Args:
        lake: where the tables are.
        accelerator_hour: price of one accelerator for one hour; fills the one-row table `prices`.
        max_staleness: the run's bound, in versions; fills the one-row table `bounds`.
    """
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    for table in TABLES.values():
        connection.register(table.name, _dataset(lake, table))
    _constant(connection, "prices", "accelerator_hour", "DOUBLE", accelerator_hour)
    _constant(connection, "bounds", "max_staleness", "BIGINT", max_staleness)
    _create_views(connection)
    return connection


class Live:
    """A connection for who asks again and again: of a query's tables only those that have changed are opened anew.

    Raises:
        LakeError: a table does not exist.
    """

    def __init__(self, lake: Lake, accelerator_hour: float = Cost().accelerator_hour) -> None:
        self._lake = lake
        self._versions = {name: lake.version(name) for name in TABLES}
        self._connection = connect(lake, accelerator_hour)

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """The rows that answer `query` of the lake as it is now."""
        for name in _tables_in(query):
            if (version := self._lake.version(name)) != self._versions[name]:
                self._connection.register(name, _dataset(self._lake, TABLES[name]))
                self._versions[name] = version
        return self._connection.execute(query).fetchall()

    def close(self) -> None:
        """Free it."""
        self._connection.close()


def rows(connection: duckdb.DuckDBPyConnection, query: str, *values: object) -> list[dict[str, Any]]:
    """The answer to `query`, a dict a row; `values` stand for its question marks."""
    answer = connection.execute(query, values)
    names = [column[0] for column in answer.description or ()]
    return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


def view_names() -> list[str]:
    """The views that `connect` creates, sorted."""
    return sorted(path.stem for path in VIEWS.glob("*.sql"))


@cache
def _tables_in(query: str) -> frozenset[str]:
    """The tables that `query` names, itself or by a view; rather one too many, where a column is called like it."""
    views, found, texts = set(view_names()), set[str](), [query]
    while texts:
        new = {word for word in re.findall(r"\w+", texts.pop().lower()) if word in TABLES or word in views} - found
        found |= new
        texts += [(VIEWS / f"{name}.sql").read_text() for name in new & views]
    return frozenset(found & TABLES.keys())


def _dataset(lake: Lake, table: Table) -> ds.Dataset | pa.Table:
    try:
        handle = DeltaTable(lake.table_uri(table.name), storage_options=lake.storage_options)
    except TableNotFoundError:
        return table.delta_schema.empty_table()
    except (DeltaError, OSError) as error:
        raise LakeError(
            f"table {table.name} at {lake.table_uri(table.name)} cannot be read: {reason(error)}"
        ) from error
    stored = pa.schema(handle.schema().to_arrow())
    missing = [f for f in table.delta_schema if f.name not in stored.names]
    if not missing:
        return handle.to_pyarrow_dataset()
    return handle.to_pyarrow_dataset(schema=pa.schema([*stored, *missing]))


def _constant(connection: duckdb.DuckDBPyConnection, name: str, column: str, type_: str, value: float | None) -> None:
    connection.execute(f"CREATE TABLE {name} ({column} {type_})")
    connection.execute(f"INSERT INTO {name} VALUES (?)", [value])  # noqa: S608 - names are ours, the value is bound


def _create_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the views; one that reads another waits until that one is there."""
    waiting = {path.stem: path.read_text() for path in sorted(VIEWS.glob("*.sql"))}
    while waiting:
        created = [name for name, query in waiting.items() if _create_view(connection, name, query)]
        if not created:
            raise LakeError(f"views {sorted(waiting)} name tables or views that do not exist")
        for name in created:
            del waiting[name]


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, query: str) -> bool:
    try:
        connection.execute(f"CREATE VIEW {name} AS\n{query}")
    except duckdb.CatalogException:
        return False
    return True
