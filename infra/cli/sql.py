"""`lagoon sql "…"`: a question to the lake."""

import json
from collections.abc import Sequence
from typing import Any

import duckdb

from infra import sql
from infra.cli import arguments, tables
from infra.lake import Lake
from schemas.errors import LakeError

SUMMARY = """\
Run one SQL query (DuckDB) on the run's lake: its tables and views by name. `show tables` lists them,
`describe ledger` shows a table's columns.
"""


def run(argv: Sequence[str]) -> int:
    """Print the answer as a table, or as JSON."""
    parser = arguments.parser("sql", SUMMARY)
    parser.add_argument("query", help="for example: select * from conservation")
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")
    args, overrides = arguments.parse(parser, argv)
    settings = arguments.settings_of(args.config, overrides)
    prices, bound = settings.cost.accelerator_hour, settings.loop.max_staleness
    with sql.connect(Lake.of(settings), accelerator_hour=prices, max_staleness=bound) as lake:
        columns, rows = _ask(lake, args.query)
    if args.json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], default=str))
    else:
        tables.show(tables.answer(columns, [[_cell(v) for v in row] for row in rows]), f"{len(rows)} rows")
    return 0


def _ask(lake: duckdb.DuckDBPyConnection, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    try:
        answer = lake.execute(query)
        return [c[0] for c in answer.description or []], answer.fetchall()
    except duckdb.Error as error:
        raise LakeError(f"the query cannot be answered: {error}") from error


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
