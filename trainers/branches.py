"""What branches returned, and the groups that are kept back until it is known."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from schemas.ids import fork_id
from schemas.names import Origin
from trainers.credit.evidence import BRANCH_MEANS

COLUMNS = ("origin", "forked_turns")
"""Columns of `experience` that branches are told by."""


@dataclass(slots=True)
class Waiting:
    """Rows of one group, read at `delta_version`; `missing` are the forks without a return."""

    delta_version: int
    rows: pa.Table
    missing: set[str]
    until_s: float


@dataclass(slots=True)
class Branches:
    """Sorts admitted rows: branches are evidence, their parents wait for it up to `wait_s` seconds, others go on.

    A fork (`schemas.ids.fork_id`) has returned when its group was admitted: every row has the mean of the whole group.
    """

    wait_s: float
    _returns: dict[str, tuple[float, int]] = field(default_factory=dict)
    _waiting: dict[str, Waiting] = field(default_factory=dict)

    def sort(self, delta_version: int, rows: pa.Table, now_s: float) -> pa.Table:
        """Those of `rows` that need not wait, read at `delta_version` at the monotonic time `now_s`."""
        branches = is_branch(rows)
        if pc.any(branches).as_py():
            self.learn(rows.filter(branches))
            rows = rows.filter(pc.invert(branches))
        is_parent = pc.greater(pc.fill_null(pc.list_value_length(rows["forked_turns"]), 0), 0)
        if not pc.any(is_parent).as_py():
            return rows
        parents = pc.unique(rows.filter(is_parent)["group_id"])
        for group in parents.to_pylist():
            siblings = rows.filter(pc.equal(rows["group_id"], group))
            missing = _forks(siblings) - self._returns.keys()
            self._waiting[group] = Waiting(delta_version, siblings, missing, now_s + self.wait_s)
        return rows.filter(pc.invert(pc.is_in(rows["group_id"], parents)))

    def learn(self, branches: pa.Table) -> None:
        """Take in what `branches` returned."""
        names = ("group_id", "group_reward_mean", "min_weight_version")
        for fork, mean, version in zip(*(branches[name].to_pylist() for name in names), strict=True):
            if mean is not None:
                self._returns[fork] = (mean, version)

    def ready(self, now_s: float) -> list[tuple[int, pa.Table]]:
        """Groups that have waited, (Delta version, rows): all their forks have returned, or their time is over."""
        for waiting in self._waiting.values():
            waiting.missing -= self._returns.keys()
        names = [name for name, w in self._waiting.items() if not w.missing or w.until_s <= now_s]
        return [(w.delta_version, w.rows) for w in map(self._waiting.pop, names)]

    def waiting(self) -> list[tuple[str, int]]:
        """Rows that wait, (trajectory_id, Delta version)."""
        return [(name, w.delta_version) for w in self._waiting.values() for name in w.rows["trajectory_id"].to_pylist()]

    def buckets(self) -> list[int]:
        """Version buckets of the rows that wait."""
        return [bucket for w in self._waiting.values() for bucket in w.rows["version_bucket"].to_pylist()]

    def forget(self, oldest: int) -> None:
        """Drop returns of weights before version `oldest`: their parents are older, and cannot be trained on."""
        self._returns = {fork: known for fork, known in self._returns.items() if known[1] >= oldest}

    def told(self, rows: pa.Table) -> pa.Table:
        """`rows` of a batch with column BRANCH_MEANS, where any of their turns has branches."""
        if not self._returns or "turns" not in rows.column_names:
            return rows
        cells = zip(rows["trajectory_id"].to_pylist(), pc.list_value_length(rows["turns"]).to_pylist(), strict=True)
        known = [
            [self._returns.get(fork_id(name, turn), (None,))[0] for turn in range(num or 0)] for name, num in cells
        ]
        if all(mean is None for means in known for mean in means):
            return rows
        return rows.append_column(BRANCH_MEANS, pa.array(known, pa.list_(pa.float64())))


def is_branch(rows: pa.Table) -> pa.ChunkedArray:
    """Which of `rows` are branches."""
    return pc.equal(rows["origin"], Origin.COUNTERFACTUAL)


def _forks(rows: pa.Table) -> set[str]:
    cells = zip(rows["trajectory_id"].to_pylist(), rows["forked_turns"].to_pylist(), strict=True)
    return {fork_id(name, turn) for name, turns in cells for turn in turns or ()}
