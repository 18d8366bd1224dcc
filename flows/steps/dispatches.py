"""Rows of `dispatches`."""

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from schemas.messages import Task
from schemas.tables import DISPATCHES


class Entry(NamedTuple):
    """A row of `dispatches`."""

    task: Task
    event: str
    reason: str | None
    at_ms: int


def to_rows(entries: Sequence[Entry]) -> pa.RecordBatch:
    """One row for each entry."""
    tasks = [e.task for e in entries]
    columns = {
        "group_id": [t.group_id for t in tasks],
        "task_id": [t.task_id for t in tasks],
        "task_family": [t.family for t in tasks],
        "event": [e.event for e in entries],
        "attempt": [t.attempt for t in tasks],
        "group_size": [t.group_size for t in tasks],
        "reason": [e.reason for e in entries],
        "directive_id": [t.directive_id for t in tasks],
        "min_weight_version": [t.min_weight_version for t in tasks],
        "at": [e.at_ms * 1000 for e in entries],
    }
    arrays = [pa.array(columns[f.name], f.type) for f in DISPATCHES.schema]
    return pa.RecordBatch.from_arrays(arrays, schema=DISPATCHES.schema)
