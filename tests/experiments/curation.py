"""The middle of the loop: the curate flow's shards and the dispatcher's draw, without a log between them."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from flows.steps.chunk import Chunk, Note, Pack
from flows.steps.difficulty import Posterior
from flows.steps.draw import Deal, Difficulty, draw
from flows.steps.ledger import Rows
from flows.steps.shard import Shard
from schemas.ids import shard_of
from schemas.messages import Directive, Fork, Task, WeightSummary
from schemas.names import NUM_SHARDS, Event, Origin
from schemas.settings import Settings
from schemas.tables import EXPERIENCE, LEDGER
from schemas.trajectory import Trajectory, to_batch

EPOCH_MS = 1_790_000_000_000
"""Flow time of version 0; a version is a second."""


@dataclass(frozen=True, slots=True)
class Curated:
    """Rows of `experience`, ids of what has left the buffer, decisions counted by event, forks that are asked for."""

    rows: pa.Table
    gone: list[str]
    events: Counter[str]
    forks: list[Fork]


class NoLog:
    """Groups come whole, so no payload is ever read again."""

    def read(self, partition: int, offset: int) -> bytes | None:
        raise RuntimeError(f"message {partition}/{offset} is asked for, but groups come whole")


class Curation:
    """All shards. `posteriors` are what they have reported, by task."""

    def __init__(self, settings: Settings):
        self.posteriors: dict[str, Posterior] = {}
        self._settings, self._num_draws, self._offset = settings, 0, 0
        self._shards = [Shard(settings, NoLog()) for _ in range(NUM_SHARDS)]

    def tasks(self, count: int, version: int, family_weights: Mapping[str, float]) -> list[Task]:
        """The next `count` groups for a learner at `version`, no task twice."""
        found: dict[str, Task] = {}
        for _ in range(count):
            task = self._task(version, family_weights, found)
            found[task.task_id] = task
        return list(found.values())

    def curate(self, members: Sequence[Trajectory], version: int, orders: Sequence[Directive]) -> Curated:
        """What the shards make of whole groups, once they have heard of `version` and `orders`."""
        by_shard: dict[int, list[Trajectory]] = defaultdict(list)
        for member in members:
            by_shard[shard_of(member.task_id)].append(member)
        rows, gone, events, forks = [EXPERIENCE.schema.empty_table()], list[str](), Counter[str](), list[Fork]()
        for number, shard in enumerate(self._shards):
            chunk = self._chunk(number, by_shard[number], version, orders)
            for item in shard.curate(chunk):
                if isinstance(item, Fork):
                    forks.append(item)
                elif not isinstance(item, Rows):
                    self.posteriors |= {
                        p.task_id: Posterior(p.alpha, p.beta, p.weight_version) for p in item.posteriors
                    }
                elif item.table == EXPERIENCE.name:
                    rows.append(pa.Table.from_batches([item.batch]))
                elif item.table == LEDGER.name:
                    told = item.batch.select(["event", "trajectory_id"]).to_pylist()
                    events.update(row["event"] for row in told)
                    gone += [row["trajectory_id"] for row in told if row["event"] in {Event.EVICTED, Event.EXPIRED}]
        return Curated(pa.concat_tables(rows), gone, events, forks)

    def branches(self, forks: Sequence[Fork], version: int) -> list[Task]:
        """The groups that `forks` ask for."""
        families = {family.name: family for family in self._settings.families}
        return [
            Task.of(
                families[fork.family],
                fork.index,
                draw=0,
                group_id=fork.group_id,
                group_size=fork.num_branches,
                seed=self._settings.run.seed,
                origin=Origin.COUNTERFACTUAL,
                branch=fork.branch,
                dispatched_at=flow_time(version),
                lease_until=flow_time(version),
            )
            for fork in forks
        ]

    def _task(self, version: int, family_weights: Mapping[str, float], busy: Mapping[str, Task]) -> Task:
        settings, number = self._settings, self._num_draws
        self._num_draws += 1
        difficulty = Difficulty(self.posteriors, version, settings.curate)
        deal = Deal(family_weights, settings.dispatch.exploration)
        family, index, _ = draw(settings.run.seed, number, settings.families, difficulty, deal, busy=busy)
        return Task.of(
            family,
            index,
            draw=number,
            run=f"experiment-{settings.run.seed}",
            group_size=settings.loop.group_size,
            seed=settings.run.seed,
            dispatched_at=flow_time(version),
            lease_until=flow_time(version),
        )

    def _chunk(self, shard: int, members: list[Trajectory], version: int, orders: Sequence[Directive]) -> Chunk:
        at_ms = EPOCH_MS + 1000 * version
        news = WeightSummary(
            version=version, fingerprint="0", num_bytes=0, train_step=version, created_at=flow_time(version)
        )
        clock = Directive(directive_id="clock", target="clock", issued_by="experiment", issued_at=flow_time(version))
        rows = to_batch(members)
        notes = [Note(at_ms, order) for order in orders if order.target in {"curate", "all"}]
        events = [Note(at_ms, news), *notes, *self._packs(rows, at_ms, members), Note(at_ms, clock)]
        return Chunk(shard, rows, tuple(events), faults=np.zeros(len(members), np.uint8))

    def _packs(self, rows: pa.RecordBatch, at_ms: int, members: list[Trajectory]) -> Iterator[Pack]:
        """One message a group, as an outbox sends them."""
        start = 0
        while start < len(members):
            stop = start + members[start].group_size
            self._offset += 1
            yield Pack(start, stop, at_ms, 0, self._offset, False, rows.slice(start, stop - start))
            start = stop


def flow_time(version: int) -> datetime:
    """When `version` is published."""
    return datetime.fromtimestamp(EPOCH_MS / 1000 + version, UTC)
