"""Which task is rolled out next, and how many are under way: leases out, reports in.

python -m flows.dispatch [--config FILE ...] [--section.key=value ...]
python -m bytewax.run flows.dispatch -r RECOVERY_FOLDER -s 1 -b 10
"""

import logging
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
from flows.connectors.items import Clock, Hole, Raw, Tick
from flows.connectors.kafka_sink import KafkaSink, kafka_output
from flows.connectors.kafka_source import TopicsSource
from flows.earlier import Earlier
from flows.metrics import note_dispatched
from flows.run import of_current_run, serve
from flows.steps.dispatcher import Dispatcher, News, State
from flows.steps.draw import dealt
from infra.kafka.follower import UNDECODABLE
from infra.lake import Lake
from schemas import messages
from schemas.errors import ContractError
from schemas.messages import BufferMessage, Directive, Message, Task, WeightSummary
from schemas.names import Service
from schemas.settings import Settings
from schemas.tables import DISPATCHES
from schemas.topics import BUFFER, CONTROL, TASKS, WEIGHTS

log = logging.getLogger("lagoon.flows")

Heard = News | Clock | Tick
Said = Task | Directive | pa.RecordBatch
Begin = Callable[[], State | None]
"""The state that the dispatcher begins with when it has none of its own."""

KEY = "dispatch"


class Decide(StatefulBatchLogic[Heard, Said, bytes]):
    """The dispatcher as a step. Ticks release the tasks of epochs that are durable."""

    def __init__(self, settings: Settings, begin: Begin, state: bytes | None) -> None:
        self._dispatcher = Dispatcher(settings, State.from_bytes(state) if state else begin())

    def on_batch(self, values: list[Heard]) -> tuple[list[Said], bool]:
        """Tasks, clock messages, and rows of `dispatches`."""
        said: list[Said] = []
        for value in values:
            if isinstance(value, Tick):
                said += self._dispatcher.send()
            elif isinstance(value, Clock):
                self._dispatcher.tick(value.now_ms)
                said.append(self._dispatcher.clock())
            else:
                self._dispatcher.hear(value)
        rows = self._dispatcher.rows()
        note_dispatched(rows, len(self._dispatcher.state.leases), self._dispatcher.state.supply)
        return [*said, *([rows] if rows is not None else [])], self.RETAIN

    def snapshot(self) -> bytes:
        """The state as bytes; tasks decided in this epoch are ready for the next."""
        return self._dispatcher.end_epoch()


def build(
    source: Source[Any],
    tasks: KafkaSink,
    clock: KafkaSink,
    rows: DeltaSink,
    settings: Settings,
    begin: Begin = lambda: None,
) -> Dataflow:
    """The flow from `source` to the `tasks` topic, the `clock` messages of the `control` topic, and `dispatches`.

    Raises:
        SettingsError: no family has a task to deal.
    """
    dealt(settings.families)  # settings without a task to deal end here, not at the first draw
    flow = Dataflow("dispatch")
    items = op.input("read", flow, source)  # Raw | Hole | Tick | Clock
    heard = op.filter_map("decode", items, decode)  # (key, BufferReport | LearnerReport | ... | Clock | Tick)
    said = op.stateful_batch("decide", heard, partial(Decide, settings, begin))  # (key, Task | Directive | RecordBatch)
    kafka_output("send", op.filter_map("select_tasks", said, task_in), tasks)  # (group id, Task)
    kafka_output("tell", op.filter_map("select_clock", said, clock_in), clock)  # ("clock", Directive)
    lake_output("write", op.filter_map_value("select_rows", said, rows_in), items, rows)  # (key, RecordBatch)
    return flow


def decode(item: Raw | Hole | Tick | Clock) -> tuple[str, Heard] | None:
    """What the dispatcher hears of `item`: a message, the time, or a tick; nothing of what nobody can read."""
    if isinstance(item, Hole):
        return None
    if not isinstance(item, Raw):
        return KEY, item
    type_ = {BUFFER.name: BufferMessage, WEIGHTS.name: WeightSummary, CONTROL.name: Directive}[item.topic]
    try:
        message = messages.decode(type_, item.value)
    except ContractError as error:  # the curate flow keeps it in dead_letters; a report comes again
        UNDECODABLE.labels(item.topic).inc()
        log.warning("%s/%d: %s", item.topic, item.offset, error)
        return None
    return KEY, message.root if isinstance(message, BufferMessage) else message


def task_in(item: tuple[str, Said]) -> tuple[str, Message | bytes] | None:
    """The task in `item`, if it is one, under its group's id."""
    return (item[1].group_id, item[1]) if isinstance(item[1], Task) else None


def clock_in(item: tuple[str, Said]) -> tuple[str, Message | bytes] | None:
    """The clock message in `item`, if it is one, under its target."""
    return (item[1].target, item[1]) if isinstance(item[1], Directive) else None


def rows_in(item: Said) -> pa.RecordBatch | None:
    """The rows in `item`, if it is some."""
    return item if isinstance(item, pa.RecordBatch) else None


def flow_for(settings: Settings, stop: Flag | None = None) -> Dataflow:
    """The flow as `settings` say; nothing is opened before it runs."""
    source = TopicsSource(
        settings.kafka,
        (BUFFER.name, WEIGHTS.name, CONTROL.name),
        epoch_bytes=settings.curate.epoch_bytes,
        skip_expired=True,  # reports are absolute: what has expired is superseded
        client_id=Service.DISPATCH,
        tick_s=settings.dispatch.tick_s,
        stop=stop,
    )
    return build(
        source,
        KafkaSink(settings.kafka, TASKS.name, Service.DISPATCH),
        KafkaSink(settings.kafka, CONTROL.name, Service.DISPATCH),
        DeltaSink(Lake.of(settings), DISPATCHES.name, settings.run.in_this_life(Service.DISPATCH), partitions=1),
        settings,
        Earlier(settings).dispatcher,
    )


__getattr__ = of_current_run(flow_for)

if __name__ == "__main__":
    serve(Service.DISPATCH, flow_for)
