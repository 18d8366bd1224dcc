"""Exactly once into Delta: stage in `snapshot()`, commit on the next epoch's tick, finish after a restart."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from bytewax.dataflow import KeyedStream, Stream
from bytewax.outputs import FixedPartitionedSink, StatefulSinkPartition
from infra.lake import Lake

from flows.connectors.items import Tick


class DeltaSink(FixedPartitionedSink[pa.RecordBatch | Tick, dict[str, Any]]):
    """Rows of one lake table, each in it exactly once. Items: (key, RecordBatch) and, to every partition, (part, Tick)."""

    def __init__(self, lake: Lake, table: str, flow: str, partitions: int, state_guard: bool = True) -> None:
        raise NotImplementedError

    def list_parts(self) -> list[str]:
        raise NotImplementedError

    def build_part(
        self, step_id: str, for_part: str, resume_state: dict[str, Any] | None
    ) -> StatefulSinkPartition[pa.RecordBatch | Tick, dict[str, Any]]:
        raise NotImplementedError


def ticks(step_id: str, items: Stream[Any], sink_keys: Sequence[str]) -> KeyedStream[Tick]:
    """The ticks among `items` (a source's stream), one for each of `sink_keys` (= `sink.list_parts()`)."""
    raise NotImplementedError


def lake_output(step_id: str, rows: KeyedStream[pa.RecordBatch], items: Stream[Any], sink: DeltaSink) -> None:
    """Write `rows` ((key, RecordBatch), columns of the table) through `sink`; commits follow the ticks of `items`."""
    raise NotImplementedError
