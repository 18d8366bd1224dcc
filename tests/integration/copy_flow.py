"""A flow for tests: one row of `dead_letters` for every item that the merging source emits, in two sink partitions."""

import sys

import bytewax.operators as op
import pyarrow as pa
from bytewax.dataflow import Dataflow

from flows.connectors import dead_letters
from flows.connectors.delta_sink import DeltaSink, lake_output
from flows.connectors.items import Hole, Raw, Tick
from flows.connectors.kafka_source import MergeSource
from flows.run import run
from infra.lake import Lake
from infra.telemetry import Stop, Telemetry, main
from schemas.settings import Settings

BOUNDED = "--bounded"


def to_row(item: Raw | Hole | Tick) -> list[tuple[str, pa.RecordBatch]]:
    if isinstance(item, Tick):
        return []
    row = dead_letters.hole(item) if isinstance(item, Hole) else dead_letters.undecodable(item, f"lane {item.lane}")
    return [(f"{item.topic}/{item.lane}", row)]


def serve(settings: Settings, telemetry: Telemetry, stop: Stop) -> None:
    source = MergeSource(
        settings.kafka,
        ["trajectories", "weights", "control"],
        epoch_bytes=settings.curate.epoch_bytes,
        skip_expired=settings.curate.skip_expired_offsets,
        client_id="copy",
        stop_at_end=BOUNDED in sys.argv,
        stop=stop,
    )
    flow = Dataflow("copy")
    items = op.input("source", flow, source)
    sink = DeltaSink(Lake.of(settings), "dead_letters", "copy", 2)
    lake_output("write", op.flat_map("to_row", items, to_row), items, sink)
    run(flow, "copy", settings, telemetry, stop)


if __name__ == "__main__":
    main("copy", serve, [a for a in sys.argv[1:] if a != BOUNDED])
