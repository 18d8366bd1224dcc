"""The live buffer: which admitted trajectories may still be trained on, and which of them come next.

Pure and deterministic: the same rows, version and weights give the same choice, so a resumed learner goes on as an
uninterrupted one would, with any number of ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

NEAR = 3
"""Ages that are drawn from in turn: the current bucket, one back, two back. Older buckets share one small weight."""


@dataclass(slots=True)
class Live:
    """A trajectory in the buffer; its payload is row `index` of `chunk`. `uses` counts the batches that it was in."""

    trajectory_id: str
    min_weight_version: int
    bucket: int
    priority: float
    delta_version: int
    arrival: int
    chunk: pa.Table
    index: int
    uses: int = 0


class LiveBuffer:
    """Live trajectories by id, in order of arrival.

    `old_weight` is the share of a batch that buckets three and more back get, as a weight beside 1 for the current one.
    """

    def __init__(self, bucket_width: int, max_uses: int, old_weight: float):
        self._bucket_width, self._max_uses, self._old_weight = bucket_width, max_uses, old_weight
        self._live: dict[str, Live] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._live

    def rows(self) -> list[Live]:
        """All live trajectories, in order of arrival."""
        return list(self._live.values())

    def add(self, delta_version: int, chunk: pa.Table, uses: Mapping[str, int] | None = None) -> None:
        """Take in the rows of `chunk`: its columns are the fields of Live, and the payload."""
        names = ("trajectory_id", "min_weight_version", "version_bucket", "priority")
        cells = zip(*(chunk.column(n).to_pylist() for n in names), strict=True)
        for index, (name, version, bucket, priority) in enumerate(cells):
            if name not in self._live:
                used = (uses or {}).get(name, 0)
                row = Live(name, version, bucket, priority, delta_version, self._arrivals, chunk, index, used)
                self._live[name] = row
                self._arrivals += 1

    def discard(self, trajectory_ids: Iterable[str]) -> int:
        """Drop these; returns how many were live."""
        return sum(self._live.pop(name, None) is not None for name in trajectory_ids)

    def prune(self, oldest: int) -> int:
        """Drop what has an action token older than version `oldest`; returns how many."""
        return self.discard([name for name, row in self._live.items() if row.min_weight_version < oldest])

    def choose(self, count: int, version: int, weights: Sequence[float] | None = None) -> list[Live]:
        """The next `count` trajectories for a learner at weight `version`; fewer only if there are no more.

        Each bucket age first gets its share of the batch (weight / sum of the weights of the ages present, rounded
        down); what is left goes to the newest buckets. By default the weights are 1 for the current bucket, 0 for one
        and two back, `old_weight` for all older ones together, so that the current comes first, the next two fill up
        and old ones are not starved. `weights` multiply these by age; an age beyond them keeps its weight. Inside a
        bucket the higher priority goes first, then the earlier arrival.
        """
        by_age = self._by_age(version // self._bucket_width)
        shares = _shares(by_age, self._old_weight, weights or ())
        total = sum(shares.values()) or 1.0
        chosen: list[Live] = []
        for age, rows in by_age.items():
            take = int(count * shares[age] / total)
            chosen += rows[:take]
            del rows[:take]
        for rows in by_age.values():
            chosen += rows[: count - len(chosen)]
        return chosen

    def use(self, rows: Iterable[Live]) -> None:
        """Count a use of `rows`; what has been used `max_uses` times leaves."""
        for row in rows:
            row.uses += 1
            if row.uses >= self._max_uses:
                del self._live[row.trajectory_id]

    def _by_age(self, bucket: int) -> dict[int, list[Live]]:
        """Rows by bucket age (NEAR stands for all older ones), newest first, each in the order of choice."""
        found: dict[int, list[Live]] = defaultdict(list)
        for row in self._live.values():
            found[min(max(bucket - row.bucket, 0), NEAR)].append(row)
        for rows in found.values():
            rows.sort(key=lambda row: (-row.priority, row.arrival))
        return dict(sorted(found.items()))


def gather(rows: Sequence[Live], columns: Sequence[str]) -> pa.Table:
    """The payload of `rows`, in their order."""
    chunks: dict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        chunks[id(row.chunk)].append(place)
    parts = [rows[places[0]].chunk.select(columns).take([rows[p].index for p in places]) for places in chunks.values()]
    order = [place for places in chunks.values() for place in places]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return pa.concat_tables(parts).combine_chunks().take(inverse)


def _shares(ages: Iterable[int], old_weight: float, multipliers: Sequence[float]) -> dict[int, float]:
    base = (1.0, *(0.0,) * (NEAR - 1), old_weight)
    return {age: base[age] * (multipliers[age] if age < len(multipliers) else 1.0) for age in ages}
