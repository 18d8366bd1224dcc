"""The live buffer: which admitted trajectories may still be trained on, and which of them come next.

Pure and deterministic: the same rows, version and weights give the same choice, so a resumed learner goes on as an
uninterrupted one would, with any number of ranks.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import attrgetter

import pyarrow as pa

from trainers.batches import Tokens

NEAR = 3
"""Ages that are drawn from in turn: the current bucket, one back, two back. Older buckets share one small weight."""

_BY_RANK = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that came together: scalar columns as Arrow, token columns as arrays."""

    rows: pa.Table
    tokens: Tokens


@dataclass(slots=True)
class Live:
    """A trajectory in the buffer: row `index` of `chunk`. `rank` orders a bucket, `uses` counts the batches it was in.

    Siblings rank by their mean priority and stay together: picking rows by their own would train on the rare outcome of
    a group without its counterweight, and advantages would not sum to zero any more.
    """

    trajectory_id: str
    group_id: str
    min_weight_version: int
    bucket: int
    group_priority: float
    delta_version: int
    chunk: Chunk
    index: int
    num_tokens: int
    rank: tuple[float, int, str, int]
    uses: int = 0


class LiveBuffer:
    """Live trajectories by id, in order of arrival, and by bucket, in order of choice.

    `old_weight` is the share of a batch that buckets three and more back get, as a weight beside 1 for the current one.
    """

    def __init__(self, bucket_width: int, max_uses: int, old_weight: float):
        self._bucket_width, self._max_uses, self._old_weight = bucket_width, max_uses, old_weight
        self._live: dict[str, Live] = {}
        self._buckets: dict[int, list[Live]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._live

    def rows(self) -> list[Live]:
        """All live trajectories, in order of arrival."""
        return list(self._live.values())

    def add(self, delta_version: int, chunk: Chunk, kept: Mapping[str, tuple[int, float]] | None = None) -> None:
        """Take in the rows of `chunk`, which hold the scalar fields of Live; known ids are passed over.

        `kept` has uses and group priority of rows that come back after a restart; a new group's priority is the mean
        over its rows in `chunk`.
        """
        names = ("trajectory_id", "group_id", "min_weight_version", "version_bucket", "priority")
        cells = list(zip(*(chunk.rows.column(n).to_pylist() for n in names), strict=True))
        means = _group_means((group, priority) for _, group, _, _, priority in cells)
        fresh: dict[int, list[Live]] = defaultdict(list)
        lengths = chunk.tokens.lengths.tolist()
        for index, (name, group, version, bucket, _) in enumerate(cells):
            if name not in self._live:
                used, mean = (kept or {}).get(name, (0, means[group]))
                rank = (-mean, delta_version, group, self._arrivals)
                size = lengths[index]
                row = Live(name, group, version, bucket, mean, delta_version, chunk, index, size, rank, used)
                self._live[name] = row
                self._arrivals += 1
                fresh[bucket].append(row)
        for bucket, rows in fresh.items():
            self._buckets[bucket] = sorted([*self._buckets.get(bucket, []), *rows], key=_BY_RANK)

    def discard(self, trajectory_ids: Iterable[str]) -> int:
        """Drop these; returns how many were live."""
        rows = [row for name in trajectory_ids if (row := self._live.pop(name, None)) is not None]
        self._sweep(Counter(row.bucket for row in rows))
        return len(rows)

    def prune(self, oldest: int) -> int:
        """Drop what has an action token older than version `oldest`; returns how many."""
        aged = [rows for bucket, rows in self._buckets.items() if bucket <= oldest // self._bucket_width]
        return self.discard([row.trajectory_id for rows in aged for row in rows if row.min_weight_version < oldest])

    def choose(self, count: int, version: int, weights: Sequence[float] | None = None) -> list[Live]:
        """The next `count` trajectories for a learner at weight `version`; fewer only if there are no more.

        Each bucket age first gets its share of the batch (weight / sum of the weights of the ages present, rounded
        down); what is left goes to the newest buckets. By default the weights are 1 for the current bucket, 0 for one
        and two back, `old_weight` for all older ones together, so that the current comes first, the next two fill up
        and old ones are not starved. `weights` multiply these by age; an age beyond them keeps its weight. Inside a
        bucket the group of higher priority goes first, then the earlier one; siblings follow one another.
        """
        by_age = self._by_age(version // self._bucket_width)
        shares = _shares(by_age, self._old_weight, weights or ())
        total = sum(shares.values()) or 1.0
        chosen = [row for age, rows in by_age.items() for row in islice(rows, int(count * shares[age] / total))]
        for rows in by_age.values():
            chosen += islice(rows, count - len(chosen))
        return chosen

    def use(self, rows: Sequence[Live]) -> None:
        """Count a use of `rows`; what has been used `max_uses` times leaves."""
        for row in rows:
            row.uses += 1
        self.discard([row.trajectory_id for row in rows if row.uses >= self._max_uses])

    def _by_age(self, bucket: int) -> dict[int, Iterator[Live]]:
        """Rows by bucket age (NEAR stands for all older ones), newest first, each in the order of choice."""
        found: dict[int, list[list[Live]]] = defaultdict(list)
        for number, rows in self._buckets.items():
            found[min(max(bucket - number, 0), NEAR)].append(rows)
        return {age: heapq.merge(*lists, key=_BY_RANK) for age, lists in sorted(found.items())}

    def _sweep(self, gone: Mapping[int, int]) -> None:
        """Take rows that are no longer live out of their buckets, of which `gone` has the numbers."""
        for bucket, count in gone.items():
            rows, live = self._buckets[bucket], self._live
            first = next((i for i, row in enumerate(rows) if row.trajectory_id in live), len(rows))
            # mostly they stood in front, because they have just been chosen
            self._buckets[bucket] = rows[first:] if first == count else [r for r in rows if r.trajectory_id in live]
            if not self._buckets[bucket]:
                del self._buckets[bucket]


def gather(rows: Sequence[Live]) -> Chunk:
    """The payload of `rows`, in their order."""
    chunks = {id(row.chunk): row.chunk for row in rows}
    ends = accumulate((chunk.rows.num_rows for chunk in chunks.values()), initial=0)
    starts = dict(zip(chunks, ends, strict=False))
    scalars = pa.concat_tables([chunk.rows for chunk in chunks.values()])
    table = scalars.take([starts[id(row.chunk)] + row.index for row in rows])
    return Chunk(table.combine_chunks(), Tokens.gather([(row.chunk.tokens, row.index) for row in rows]))


def _group_means(priorities: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for group, priority in priorities:
        found[group].append(priority)
    return {group: sum(values) / len(values) for group, values in found.items()}


def _shares(ages: Iterable[int], old_weight: float, multipliers: Sequence[float]) -> dict[int, float]:
    base = (1.0, *(0.0,) * (NEAR - 1), old_weight)
    return {age: base[age] * (multipliers[age] if age < len(multipliers) else 1.0) for age in ages}
