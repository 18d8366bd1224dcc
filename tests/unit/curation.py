"""One shard, without a dataflow, for tests of what it decides."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from flows.connectors.items import Hole, Raw
from flows.steps.decode import Sequences, decode
from flows.steps.ledger import Rows
from flows.steps.shard import Shard
from flows.steps.state import State
from flows.steps.validate import validate
from schemas.ids import shard_of
from schemas.messages import BufferReport, Fork
from schemas.settings import Settings
from schemas.tables import TABLES
from schemas.topics import TRAJECTORIES

SETTINGS = Settings.model_validate(
    {
        "loop": {"group_size": 4, "batch_size": 4, "max_staleness": 3},
        "curate": {"capacity": 4096, "group_timeout_s": 5},
    }
)


class Log:
    """A log that holds the messages it was given: the payload reader of tests."""

    def __init__(self) -> None:
        self.bodies: dict[tuple[int, int], bytes] = {}
        self.reads = 0

    def read(self, partition: int, offset: int) -> bytes | None:
        self.reads += 1
        return self.bodies.get((partition, offset))


class Curation:
    """Shard of task `task`, from bytes to rows. `rows` gathers what each table got."""

    def __init__(self, settings: Settings = SETTINGS, task: str = "add/7") -> None:
        self.settings, self.shard = settings, shard_of(task)
        self.log, self.sequences = Log(), Sequences()
        self.curator = Shard(settings, self.log)
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        self.reports: list[BufferReport] = []
        self.forks: list[Fork] = []

    def feed(self, *items: Raw | Hole) -> list[pa.RecordBatch]:
        """Let the shard see `items` in one call; returns the batches."""
        for item in items:
            if isinstance(item, Raw) and item.topic == TRAJECTORIES.name:
                self.log.bodies[item.partition, item.offset] = item.value
        chunk = validate(decode(self.shard, items, self.sequences), self.settings.families)
        found = self.curator.curate(chunk)
        for item in found:
            if isinstance(item, Rows):
                assert item.batch.schema.equals(TABLES[item.table].schema)
                self.rows[item.table] += item.batch.to_pylist()
            elif isinstance(item, Fork):
                self.forks.append(item)
            else:
                self.reports.append(item)
        return [item.batch for item in found if isinstance(item, Rows)]

    def restart(self) -> None:
        """A new process that knows the state and nothing else."""
        self.curator = Shard(self.settings, self.log, State.from_bytes(self.curator.state.to_bytes()))
        self.sequences = dict(self.sequences)

    def events(self, *keys: str) -> list[Any]:
        """The ledger as (event, key, ...) tuples, in order."""
        return [tuple(row[k] for k in ("event", *keys)) for row in self.rows["ledger"]]

    def count(self) -> dict[str, int]:
        """Ledger rows by event."""
        names = [row["event"] for row in self.rows["ledger"]]
        return {name: names.count(name) for name in sorted(set(names))}


def feed_each(curation: Curation, items: Sequence[Raw]) -> Curation:
    """Feed `items` one call each."""
    for item in items:
        curation.feed(item)
    return curation
