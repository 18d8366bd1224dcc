"""Sinks of tests: lists in place of the lake and of topics."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from bytewax.outputs import FixedPartitionedSink, StatefulSinkPartition

from flows.connectors.delta_sink import DeltaSink
from flows.connectors.items import Tick
from flows.connectors.kafka_sink import KafkaSink


class ListSink(FixedPartitionedSink[Any, int]):
    """Appends what it is given to `items`; ticks are left out. Its state is how many items are durable."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def list_parts(self) -> list[str]:
        return ["p000"]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> "ListPart":
        del self.items[resume_state or 0 :]  # what came after the last durable epoch comes again
        return ListPart(self.items)


class ListPart(StatefulSinkPartition[Any, int]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def write_batch(self, values: list[Any]) -> None:
        self.items += [v for v in values if not isinstance(v, Tick)]

    def snapshot(self) -> int:
        return len(self.items)


class Lists:
    """A list for each table and one for messages; `sink` and `messages` fit where the flows take the real ones."""

    def __init__(self) -> None:
        self.batches: dict[str, list[pa.RecordBatch]] = {}
        self.sent: list[Any] = []

    @property
    def sink(self) -> Callable[[str], DeltaSink]:
        return lambda table: ListSink(self.batches.setdefault(table, []))  # pyright: ignore[reportReturnType]

    @property
    def messages(self) -> KafkaSink:
        return ListSink(self.sent)  # pyright: ignore[reportReturnType]

    def rows(self, table: str) -> list[dict[str, Any]]:
        return [row for batch in self.batches.get(table, []) for row in batch.to_pylist()]
