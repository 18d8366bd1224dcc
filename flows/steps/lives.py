"""Coordinates of messages across the lives of a run: offsets begin anew with a log, names of logs do not repeat."""

import pyarrow as pa

from schemas.settings import Run


def stamped(batch: pa.RecordBatch, run: Run) -> pa.RecordBatch:
    """`batch` with the run's life in what names a place in Kafka's log: `trajectories@1`."""
    if not run.life:
        return batch
    for name in ("topic", "replayed_from"):
        if name in batch.schema.names:
            index = batch.schema.get_field_index(name)
            batch = batch.set_column(index, batch.schema.field(index), _stamped(batch.column(index), run))
    return batch


def _stamped(column: pa.Array, run: Run) -> pa.Array:
    places = [None if place is None else place.partition("/") for place in column.to_pylist()]
    names = [None if p is None else f"{run.in_this_life(p[0])}{p[1]}{p[2]}" for p in places]
    return pa.array(names, column.type)
