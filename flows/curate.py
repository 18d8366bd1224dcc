"""Trajectories become experience: decoded, validated, grouped, judged, and every decision written down.

python -m flows.curate [--config FILE ...] [--section.key=value ...]
python -m bytewax.run flows.curate -r RECOVERY_FOLDER -s 1 -b 10
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import bytewax.operators as op
import pyarrow as pa
from bytewax.dataflow import Dataflow
from bytewax.inputs import Source
from bytewax.operators import StatefulBatchLogic

from flows.connectors.delta_sink import DeltaSink, lake_output
from flows.connectors.epochs import Flag
from flows.connectors.items import Hole, Raw, Tick
from flows.connectors.kafka_sink import KafkaSink, kafka_output
from flows.connectors.kafka_source import MergeSource
from flows.connectors.refetch import Refetch
from flows.earlier import Earlier
from flows.metrics import note_curated
from flows.run import of_current_run, serve
from flows.steps.chunk import Chunk
from flows.steps.decode import Body, Sequences, decode
from flows.steps.ledger import Rows
from flows.steps.lives import stamped
from flows.steps.payloads import PayloadReader
from flows.steps.route import shards
from flows.steps.shard import Shard
from flows.steps.state import State
from flows.steps.validate import validate
from infra.claims import Claims
from infra.lake import Lake
from schemas.ids import shard_key
from schemas.messages import BufferReport, Fork, Message
from schemas.names import Service
from schemas.settings import Run, Settings
from schemas.tables import DEAD_LETTERS, EXPERIENCE, GROUPS, LEDGER, TASK_DIFFICULTY
from schemas.topics import BUFFER, CONTROL, TRAJECTORIES, WEIGHTS

Routed = tuple[int, Raw | Hole]
Begin = Callable[[int], State]
"""The state that a shard begins with when it has none of its own."""

TABLES = (EXPERIENCE.name, LEDGER.name, GROUPS.name, TASK_DIFFICULTY.name, DEAD_LETTERS.name)


class Decode(StatefulBatchLogic[Routed, Chunk, Sequences]):
    """Messages of a shard become one chunk a call. State: the last sequence number of each outbox."""

    def __init__(self, body: Body, sequences: Sequences | None) -> None:
        self._body = body
        self._sequences: Sequences = dict(sequences or {})

    def on_batch(self, values: list[Routed]) -> tuple[list[Chunk], bool]:
        """One chunk."""
        return [decode(values[0][0], [item for _, item in values], self._sequences, self._body)], self.RETAIN

    def snapshot(self) -> Sequences:
        """A copy."""
        return dict(self._sequences)


class Curate(StatefulBatchLogic[Chunk, Rows | BufferReport | Fork, bytes]):
    """Chunks become decisions. State: `State`, pickled here, for Bytewax pickles when it may have moved on."""

    def __init__(self, settings: Settings, reader: PayloadReader, begin: Begin, state: bytes | None) -> None:
        self._begin, self._shard = begin, Shard(settings, reader, State.from_bytes(state) if state else None)
        self._is_new = state is None

    def on_batch(self, values: list[Chunk]) -> tuple[list[Rows | BufferReport | Fork], bool]:
        """What follows from the chunks, in order."""
        if self._is_new:  # only now it is known which shard this is
            self._shard.begin(self._begin(values[0].shard))
            self._is_new = False
        items = [item for chunk in values for item in self._shard.curate(chunk)]
        note_curated(items)
        return items, self.RETAIN

    def snapshot(self) -> bytes:
        """The state as bytes."""
        return self._shard.state.to_bytes()


def build(
    source: Source[Any],
    sink: Callable[[str], DeltaSink],
    reports: KafkaSink | None,
    reader: PayloadReader,
    settings: Settings,
    begin: Begin = lambda _: State(),
) -> Dataflow:
    """The flow from `source` (one order in each lane) to one `sink(table)` for each of TABLES, and to `reports`."""
    to_shards = partial(route, num_partitions=settings.kafka.partitions)
    check = partial(validate, families=settings.families)

    flow = Dataflow("curate")
    items = op.input("read", flow, source)  # Raw | Hole | Tick
    routed = op.flat_map("route", items, to_shards)  # (shard key, (shard, Raw | Hole))
    chunks = op.stateful_batch(
        "decode", routed, partial(Decode, Claims.of(settings).body)
    )  # (shard key, Chunk): all rows of a call in one batch
    checked = op.map_value("validate", chunks, check)  # (shard key, Chunk), with the faults of each row
    decided = op.stateful_batch(
        "curate", checked, partial(Curate, settings, reader, begin)
    )  # (shard key, Rows | BufferReport | Fork)
    for table in TABLES:
        select = partial(of_table, table, settings.run)
        rows = op.filter_map_value(f"select_{table}", decided, select)  # (shard key, RecordBatch)
        lake_output(f"write_{table}", rows, items, sink(table))
    if reports:
        told = op.filter_map("select_reports", decided, report_in)  # (message key, BufferReport | Fork)
        kafka_output("report", told, reports)
    return flow


def route(item: Raw | Hole | Tick, num_partitions: int) -> list[tuple[str, Routed]]:
    """`item` for each shard that is to see it. Bytes cross between workers, not batches: those pickle slowly."""
    if isinstance(item, Tick):
        return []
    return [(shard_key(shard), (shard, item)) for shard in shards(item, num_partitions)]


def of_table(table: str, run: Run, item: Rows | BufferReport | Fork) -> pa.RecordBatch | None:
    """The batch in `item`, if it is for `table`."""
    return stamped(item.batch, run) if isinstance(item, Rows) and item.table == table else None


def report_in(item: tuple[str, Rows | BufferReport | Fork]) -> tuple[str, Message | bytes] | None:
    """What `item` tells the dispatcher, if it does, under the key that it is compacted by."""
    key, told = item
    return None if isinstance(told, Rows) else (f"fork-{key}" if isinstance(told, Fork) else key, told)


def flow_for(settings: Settings, stop: Flag | None = None, stop_at_end: bool = False) -> Dataflow:
    """The flow as `settings` say; nothing is opened before it runs."""
    source = MergeSource(
        settings.kafka,
        (TRAJECTORIES.name, WEIGHTS.name, CONTROL.name),
        epoch_bytes=settings.curate.epoch_bytes,
        skip_expired=settings.curate.skip_expired_offsets,
        client_id=Service.CURATE,
        stop_at_end=stop_at_end,
        stop=stop,
    )
    lake, parts = Lake.of(settings), settings.lake.sink_partitions
    return build(
        source,
        lambda table: DeltaSink(lake, table, settings.run.in_this_life(Service.CURATE), parts),
        KafkaSink(settings.kafka, BUFFER.name, Service.CURATE),
        Refetch(settings.kafka, TRAJECTORIES.name, f"{Service.CURATE}-refetch", Claims.of(settings)),
        settings,
        Earlier(settings).shard,
    )


__getattr__ = of_current_run(flow_for)

if __name__ == "__main__":
    serve(Service.CURATE, flow_for)
