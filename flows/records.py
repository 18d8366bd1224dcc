"""Evals, usage, weights and directives: from their topics into lake tables, each message exactly once.

python -m flows.records [--config FILE ...] [--section.key=value ...]
python -m bytewax.run flows.records -r RECOVERY_FOLDER -s 1 -b 10
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import bytewax.operators as op
import pyarrow as pa
from bytewax.dataflow import Dataflow
from bytewax.inputs import Source

from flows.connectors.delta_sink import DeltaSink, lake_output
from flows.connectors.epochs import Flag
from flows.connectors.kafka_source import TopicsSource
from flows.run import of_current_run, serve
from flows.steps.lives import stamped
from flows.steps.records import TABLES, TOPICS, to_rows
from infra.lake import Lake
from schemas.names import Service
from schemas.settings import Settings

Stamp = Callable[[pa.RecordBatch], pa.RecordBatch]


def build(source: Source[Any], sink: Callable[[str], DeltaSink], stamp: Stamp = lambda batch: batch) -> Dataflow:
    """The flow from `source` (Raw | Hole | Tick) to one `sink(table)` for each table; each batch passes `stamp`."""
    flow = Dataflow("records")
    items = op.input("source", flow, source)  # Raw | Hole | Tick
    rows = op.flat_map_batch("decode", items, to_rows)  # (table, RecordBatch)
    for table in TABLES:
        of_table = op.filter(f"{table}_only", rows, lambda row, table=table: row[0] == table)
        of_table = op.map_value(f"{table}_stamp", of_table, stamp)
        lake_output(f"{table}_write", of_table, items, sink(table))
    return flow


def flow_for(settings: Settings, stop: Flag | None = None, stop_at_end: bool = False) -> Dataflow:
    """The flow as `settings` say; nothing is opened before it runs."""
    source = TopicsSource(
        settings.kafka,
        TOPICS,
        epoch_bytes=settings.curate.epoch_bytes,
        skip_expired=settings.curate.skip_expired_offsets,
        client_id=Service.RECORDS,
        stop_at_end=stop_at_end,
        stop=stop,
    )
    lake, name = Lake.of(settings), settings.run.in_this_life(Service.RECORDS)
    return build(source, lambda table: DeltaSink(lake, table, name, partitions=1), partial(stamped, run=settings.run))


__getattr__ = of_current_run(flow_for)

if __name__ == "__main__":
    serve(Service.RECORDS, flow_for)
