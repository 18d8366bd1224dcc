"""Rows of lake tables for tests: what a test names, and a neutral value for every other column."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from schemas.tables import TABLES

AT = datetime(2026, 11, 1, 12, tzinfo=UTC)


def row(table: str, **values: Any) -> dict[str, Any]:
    """A row of `table`: `values`, nulls where the contract allows them, zeros and empty texts elsewhere."""
    schema = TABLES[table].schema
    assert not set(values) - set(schema.names), set(values) - set(schema.names)
    return {f.name: values[f.name] if f.name in values else _neutral(f) for f in schema}


def _neutral(field: pa.Field) -> Any:
    if field.nullable:
        return None
    if pa.types.is_list(field.type):
        return []
    if pa.types.is_timestamp(field.type):
        return AT
    if pa.types.is_string(field.type):
        return "2026-11-01" if field.name == "day" else ""
    return pa.scalar(0, pa.int64()).cast(field.type).as_py()
