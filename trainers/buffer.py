"""The live buffer: which admitted trajectories may still be trained on, and which of them come next.

Pure and deterministic: the same rows, version, weights and number of the draw give the same choice, so a resumed
learner goes on as an uninterrupted one would, with any number of ranks.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from operator import attrgetter
from typing import NamedTuple

import pyarrow as pa

from trainers.batches import Tokens, num_action_tokens
from trainers.fairness import Fairness, length_class
from trainers.siblings import Chunk, Live, Siblings

NEAR = 3
"""Ages that are drawn from in turn: the current bucket, one back, two back. Older buckets share one small weight."""

Memory = tuple[float, int, float | None]
"""What a checkpoint keeps of a live group: priority, length class, and the probability that its rest was drawn with."""


class Pick(NamedTuple):
    """A row that was drawn, and the probability that it would be."""

    row: Live
    probability: float


@dataclass(frozen=True, slots=True)
class Rule:
    """How rows are drawn.

    `old_weight` is the share of a batch that buckets three and more back get, as a weight beside 1 for the current one;
    `exponent` is what priorities inside a bucket are raised to.
    """

    bucket_width: int = 1
    max_uses: int = 1
    old_weight: float = 0.05
    exponent: float = 1.0
    group_size: int = 1


class LiveBuffer:
    """Live trajectories by id, in order of arrival, and by group."""

    def __init__(self, rule: Rule, fairness: Fairness | None = None):
        self.fairness = fairness or Fairness()
        self._rule = rule
        self._live: dict[str, Live] = {}
        self._groups: dict[str, Siblings] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._live

    def rows(self) -> list[Live]:
        """All live trajectories, in order of arrival."""
        return list(self._live.values())

    def groups(self) -> dict[str, Memory]:
        """What is to be kept of each live group."""
        return {name: (group.priority, group.length, group.rest_of) for name, group in self._groups.items()}

    def add(self, delta_version: int, chunk: Chunk, uses: Sequence[int] = ()) -> None:
        """Take in the rows of `chunk`, which hold the scalar fields of Live; known ids are passed over.

        A new group's priority and length class are those of the mean over its rows in `chunk`. `uses` has those of rows
        that come back after a restart, whose groups `remember` has made.
        """
        names = ("trajectory_id", "group_id", "min_weight_version", "version_bucket")
        columns = [chunk.rows.column(name).to_pylist() for name in names]
        lengths, back, come = chunk.tokens.lengths.tolist(), bool(len(uses)), list[int]()
        self._make_groups(columns[1], chunk)
        for index, (name, group, version, bucket) in enumerate(zip(*columns, strict=True)):
            if name in self._live:
                continue
            used = uses[index] if back else 0
            row = Live(name, group, version, bucket, delta_version, chunk, index, lengths[index], self._arrivals, used)
            self._arrivals += 1
            self._live[name] = row
            siblings = self._groups[group]
            siblings.rows.append(row)
            come.append(siblings.length)
        if not back:
            self.fairness.note_come(Counter(come))
        for group in set(columns[1]):
            self._groups[group].rows.sort(key=attrgetter("min_weight_version", "arrival"))  # the oldest expire first
            if not self._groups[group].rows:
                del self._groups[group]

    def remember(self, groups: Mapping[str, Memory]) -> None:
        """Know the groups of rows that come back after a restart."""
        self._groups = {name: Siblings(name, p, length, rest_of=rest) for name, (p, length, rest) in groups.items()}

    def discard(self, trajectory_ids: Iterable[str]) -> int:
        """Drop these; returns how many were live."""
        gone = [row for name in trajectory_ids if (row := self._live.pop(name, None)) is not None]
        for name in {row.group_id for row in gone}:
            group = self._groups[name]
            group.rows = [row for row in group.rows if row.trajectory_id in self._live]
            if not group.rows:
                del self._groups[name]
        return len(gone)

    def prune(self, oldest: int) -> int:
        """Drop what has an action token older than version `oldest`; returns how many."""
        return self.discard([row.trajectory_id for row in self._live.values() if row.min_weight_version < oldest])

    def choose(self, count: int, version: int, weights: Sequence[float] | None = None, number: int = 0) -> list[Pick]:
        """Draw `number`: the next `count` trajectories for a learner at weight `version`; fewer only if there are none.

        First comes what the batch before left of its groups, and each length class gets what it is owed (`fairness`).
        Then each bucket age gets its share of the rest (weight / sum of the weights of the ages present, rounded down);
        what is left goes to the newest buckets. By default the weights are 1 for the current bucket, 0 for one and two
        back, `old_weight` for all older ones together, so that the current comes first, the next two fill up and old
        ones are not starved. `weights` multiply these by age; an age beyond them keeps its weight. Inside a bucket,
        groups are drawn at random by priority.
        """
        draw = _Draw(self._by_age(version // self._rule.bucket_width), number, self._rule)
        for age in draw.ages:
            draw.take(age, count - len(draw), _is_rest)
        for length, debt in self.fairness.owed().items():
            left = debt - debt % self._rule.group_size
            for age in draw.ages:
                left -= draw.take(age, min(left, count - len(draw)), partial(_is_of, length))
        shares = _shares(draw.ages, self._rule.old_weight, weights or ())
        total, rest = sum(shares.values()) or 1.0, count - len(draw)
        for age, share in shares.items():
            draw.take(age, int(rest * share / total))
        for age in draw.ages:
            draw.take(age, count - len(draw))
        return list(draw.picks())

    def use(self, picks: Sequence[Pick]) -> None:
        """Count a use of the drawn rows; what has been used `max_uses` times leaves."""
        groups = {pick.row.group_id: (self._groups[pick.row.group_id], pick.probability) for pick in picks}
        drawn = {pick.row.trajectory_id for pick in picks}
        for group, probability in groups.values():
            whole = all(row.trajectory_id in drawn for row in group.rows)
            group.rest_of = None if whole else probability
        self.fairness.note_trained(Counter(groups[pick.row.group_id][0].length for pick in picks))
        for pick in picks:
            pick.row.uses += 1
        self.discard([pick.row.trajectory_id for pick in picks if pick.row.uses >= self._rule.max_uses])

    def _make_groups(self, groups: Sequence[str], chunk: Chunk) -> None:
        found: dict[str, list[int]] = defaultdict(list)
        for index, group in enumerate(groups):
            if group not in self._groups:
                found[group].append(index)
        priorities, actions = chunk.rows.column("priority").to_pylist(), num_action_tokens(chunk.tokens).tolist()
        for group, rows in found.items():
            priority = sum(priorities[i] for i in rows) / len(rows)
            length = length_class(sum(actions[i] for i in rows) / len(rows))
            self._groups[group] = Siblings(group, priority, length)

    def _by_age(self, bucket: int) -> dict[int, list[Siblings]]:
        """Groups by bucket age (NEAR stands for all older ones), newest first."""
        found: dict[int, list[Siblings]] = defaultdict(list)
        for group in self._groups.values():
            found[min(max(bucket - group.bucket, 0), NEAR)].append(group)
        return dict(sorted(found.items()))


class _Draw:
    """A draw under way: groups of each age in the order of their alarms, and how many rows of each are taken."""

    def __init__(self, ages: Mapping[int, list[Siblings]], number: int, rule: Rule):
        self._exponent = rule.exponent
        self._rings = {g.group_id: g.ring(number, rule.exponent) for groups in ages.values() for g in groups}
        self.ages = {age: sorted(groups, key=self._order) for age, groups in ages.items()}
        self._taken: dict[str, int] = {}
        self._open: set[tuple[int, int]] = set()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def take(self, age: int, count: int, wanted: Callable[[Siblings], bool] | None = None) -> int:
        """Take `count` more rows of `age`, of groups that are `wanted`, else of any; returns how many there were."""
        left = max(count, 0)
        for group in self.ages[age]:
            if not left:
                break
            before = self._taken.get(group.group_id, 0)
            more = min(left, len(group.rows) - before)
            if more > 0 and (wanted is None or wanted(group)):
                self._taken[group.group_id] = before + more
                left -= more
                if wanted is None:
                    self._open.add((age, group.length))
        self._size += max(count, 0) - left
        return max(count, 0) - left

    def picks(self) -> Iterator[Pick]:
        """The rows that were taken, newest age first, each with its probability.

        Given the other alarms, a group is drawn if its own goes off before that of the first which was not. Where a
        length class got no more than it was owed, that is the first of its class.
        """
        for age, groups in self.ages.items():
            first, first_of = math.inf, dict[int, float]()
            for group in reversed(groups):
                if group.group_id not in self._taken:
                    first = first_of[group.length] = self._rings[group.group_id]
            for group in groups:
                if not (taken := self._taken.get(group.group_id, 0)):
                    continue
                until = first if (age, group.length) in self._open else first_of.get(group.length, math.inf)
                probability = group.probability(until, self._exponent)
                for row in islice(group.rows, taken):
                    yield Pick(row, probability)

    def _order(self, group: Siblings) -> tuple[float, int]:
        return self._rings[group.group_id], group.rows[0].arrival


def _is_rest(group: Siblings) -> bool:
    return group.rest_of is not None


def _is_of(length: int, group: Siblings) -> bool:
    return group.length == length


def gather(rows: Sequence[Live]) -> Chunk:
    """The payload of `rows`, in their order."""
    chunks = {id(row.chunk): row.chunk for row in rows}
    ends = accumulate((chunk.rows.num_rows for chunk in chunks.values()), initial=0)
    starts = dict(zip(chunks, ends, strict=False))
    scalars = pa.concat_tables([chunk.rows for chunk in chunks.values()])
    table = scalars.take([starts[id(row.chunk)] + row.index for row in rows])
    return Chunk(table.combine_chunks(), Tokens.gather([(row.chunk.tokens, row.index) for row in rows]))


def _shares(ages: Iterable[int], old_weight: float, multipliers: Sequence[float]) -> dict[int, float]:
    base = (1.0, *(0.0,) * (NEAR - 1), old_weight)
    return {age: base[age] * (multipliers[age] if age < len(multipliers) else 1.0) for age in ages}
