"""What credit is given by: outcomes, group statistics and process rewards of a batch."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.names import Status
from trainers.batches import Floats, Ints
from trainers.credit.turns import Turns

BRANCH_MEANS = "branch_means"
"""Column of a batch's rows, list<float64> by turn: mean outcome of the branches of each, null where it has none."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of n rows with m turns. Per row: `outcomes`, the closed group's `means`, `stds`, `nums`; `groups` numbers groups.

    `process` float64 [m] are the turns' process rewards, on the outcome's scale and with their weight; `truncated` bool
    [n], rows that were cut off, whose outcome is not the end of what they would have earned; `branch_means` [m], what
    branches of a turn earned on average, NaN where it has none; None where no turn has any.
    """

    turns: Turns
    outcomes: Floats
    means: Floats
    stds: Floats
    nums: Floats
    groups: Ints
    process: Floats
    truncated: NDArray[np.bool_]
    branch_means: Floats | None = None

    @classmethod
    def of(cls, rows: pa.Table, turns: Turns, process_factor: float) -> "Evidence":
        """The evidence in `rows`; `process_factor` is the weight of process rewards times what scales them."""
        columns = ("reward", "group_reward_mean", "group_reward_std", "group_num_rewards")
        outcomes, means, stds, nums = (rows[name].cast(pa.float64()).to_numpy() for name in columns)
        groups = pc.dictionary_encode(rows["group_id"].combine_chunks()).indices.to_numpy().astype(np.int64)
        truncated = np.array(pc.equal(rows["status"], Status.TRUNCATED).to_pylist(), np.bool_)
        process, branches = turns.rewards * process_factor, _branch_means(rows, turns)
        return cls(turns, outcomes, means, stds, nums, groups, process, truncated, branches)

    @property
    def rewards(self) -> Floats:
        """What each turn earns, [m]: its process reward, and the outcome at a row's last turn."""
        earned = self.process.copy()
        last = self.turns.last
        earned[last] += self.outcomes[self.turns.owners[last]]
        return earned

    def centered_process_to_go(self, gamma: float) -> Floats:
        """Per turn the discounted process rewards from it on, each less the mean over its siblings' turns, [m]."""
        if not self.process.any():
            return np.zeros(len(self.process))
        groups = self.groups[self.turns.owners]
        means = np.bincount(groups, self.process) / np.maximum(np.bincount(groups), 1)
        return self.turns.to_go(self.process - means[groups], gamma)


def _branch_means(rows: pa.Table, turns: Turns) -> Floats | None:
    """Column BRANCH_MEANS of `rows`, [m], if it is there: lists with one for each of the first turns of a row."""
    if BRANCH_MEANS not in rows.column_names:
        return None
    found = np.full(len(turns.starts), np.nan)
    for row, means in enumerate(rows[BRANCH_MEANS].to_pylist()):
        start, end = turns.bounds[row : row + 2]
        known = np.array((means or ())[: end - start], np.float64)  # null becomes NaN
        found[start : start + len(known)] = known
    return found
