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


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of n rows with m turns. Per row: `outcomes`, the closed group's `means`, `stds`, `nums`; `groups` numbers groups.

    `process` float64 [m] are the turns' process rewards, on the outcome's scale and with their weight; `truncated` bool
    [n], rows that were cut off, whose outcome is not the end of what they would have earned.
    """

    turns: Turns
    outcomes: Floats
    means: Floats
    stds: Floats
    nums: Floats
    groups: Ints
    process: Floats
    truncated: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: pa.Table, turns: Turns, process_factor: float) -> "Evidence":
        """The evidence in `rows`; `process_factor` is the weight of process rewards times what scales them."""
        columns = ("reward", "group_reward_mean", "group_reward_std", "group_num_rewards")
        outcomes, means, stds, nums = (rows[name].cast(pa.float64()).to_numpy() for name in columns)
        groups = pc.dictionary_encode(rows["group_id"].combine_chunks()).indices.to_numpy().astype(np.int64)
        truncated = np.array(pc.equal(rows["status"], Status.TRUNCATED).to_pylist(), np.bool_)
        return cls(turns, outcomes, means, stds, nums, groups, turns.rewards * process_factor, truncated)

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
