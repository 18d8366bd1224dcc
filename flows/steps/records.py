"""Messages of the small topics to rows of their tables."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from flows.connectors import dead_letters
from flows.connectors.items import Clock, Hole, Raw, Tick
from schemas.errors import ContractError
from schemas.messages import Directive, EvalResult, Message, UsageInterval, WeightSummary, decode
from schemas.tables import DEAD_LETTERS, DIRECTIVES, EVALS, USAGE, WEIGHTS, Table
from schemas.topics import CONTROL
from schemas.topics import EVALS as EVALS_TOPIC
from schemas.topics import USAGE as USAGE_TOPIC
from schemas.topics import WEIGHTS as WEIGHTS_TOPIC

Row = dict[str, Any]


def _same_names(message: Message) -> Row:
    return message.model_dump()


def _eval_row(result: Message) -> Row:
    row = result.model_dump()
    return row | {"families": json.dumps(row["families"])}


def _directive_row(directive: Message) -> Row:
    row = directive.model_dump(include={"directive_id", "target", "issued_by", "reason", "issued_at"})
    return row | {"body": directive.model_dump_json(exclude_none=True)}


_KINDS: dict[str, tuple[type[Message], Table, Callable[[Message], Row]]] = {
    EVALS_TOPIC.name: (EvalResult, EVALS, _eval_row),
    USAGE_TOPIC.name: (UsageInterval, USAGE, _same_names),
    WEIGHTS_TOPIC.name: (WeightSummary, WEIGHTS, _same_names),
    CONTROL.name: (Directive, DIRECTIVES, _directive_row),
}
"""Topic -> its messages, their table, a message's row."""

TOPICS = tuple(_KINDS)
TABLES = (*(table.name for _, table, _ in _KINDS.values()), DEAD_LETTERS.name)


def to_rows(items: Sequence[Raw | Hole | Tick | Clock]) -> list[tuple[str, pa.RecordBatch]]:
    """(table, rows) of the messages among `items`, in order; what nobody can read goes to `dead_letters`.

    `clock` directives carry no order and are left out.
    """
    rows: list[tuple[str, pa.RecordBatch]] = []
    for item in items:
        if isinstance(item, Hole):
            rows.append((DEAD_LETTERS.name, dead_letters.hole(item)))
        elif isinstance(item, Raw):
            rows += _rows(item)
    return rows


def _rows(raw: Raw) -> list[tuple[str, pa.RecordBatch]]:
    type_, table, row_of = _KINDS[raw.topic]
    try:
        message = decode(type_, raw.value)
        if isinstance(message, Directive) and message.target == "clock":
            return []
        return [(table.name, _batch(table, row_of(message)))]
    except ContractError as error:
        return [(DEAD_LETTERS.name, dead_letters.undecodable(raw, str(error)))]


def _batch(table: Table, row: Row) -> pa.RecordBatch:
    """`row` under the table's schema: types are declared, never inferred."""
    try:
        return pa.RecordBatch.from_pylist([row], schema=table.schema)
    except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
        raise ContractError(f"a value does not fit its column in {table.name}: {error}") from error
