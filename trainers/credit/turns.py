"""Where the turns of a batch lie: the unit of credit. Observations belong to no turn's tokens, and so earn nothing."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainers.batches import Floats, Ints, Tokens


@dataclass(frozen=True, slots=True)
class Turns:
    """The m turns of n rows, laid end to end: row i has turns [bounds[i], bounds[i + 1]).

    `starts` int64 [m] are the first tokens of their actions among all tokens, `owners` int64 [m] their rows, `rewards`
    float64 [m] their process rewards as the environment gave them (0 where `turns` was not read).
    """

    starts: Ints
    owners: Ints
    bounds: Ints
    rewards: Floats

    @classmethod
    def of(cls, rows: pa.Table, tokens: Tokens) -> "Turns":
        """The turns of `rows`: by their column `turns`, and where that says nothing, by the runs of their action mask.

        The two agree unless an environment answers a turn with no token at all.
        """
        actions = tokens.actions()
        begins = actions.copy()
        begins[1:] &= ~actions[:-1]
        places, rewards = _recorded(rows, tokens)
        begins[places[actions[places]]] = True
        starts = np.flatnonzero(begins)
        owners = np.searchsorted(tokens.offsets, starts, side="right") - 1
        bounds = np.searchsorted(owners, np.arange(len(tokens.lengths) + 1))
        earned = np.zeros(len(starts))
        turn = np.searchsorted(starts, places, side="right") - 1
        row = np.searchsorted(tokens.offsets, places, side="right") - 1
        mine = (turn >= 0) & (owners[turn] == row) if len(starts) else turn >= 0
        np.add.at(earned, turn[mine], rewards[mine])
        return cls(starts, owners, bounds, earned)

    @property
    def numbers(self) -> Ints:
        """Each turn's place in its row, from 0, [m]."""
        return np.arange(len(self.starts)) - self.bounds[self.owners]

    @property
    def last(self) -> Ints:
        """The last turn of each row that has one."""
        return self.bounds[1:][np.diff(self.bounds) > 0] - 1

    def of_tokens(self, num_tokens: int) -> Ints:
        """For each of all tokens, [T], the turn that began last before it, which its action tokens belong to."""
        if not len(self.starts):
            return np.zeros(num_tokens, np.int64)
        return np.repeat(np.arange(len(self.starts)), self._reach(num_tokens))

    def spread(self, values: Floats, tokens: Tokens) -> NDArray[np.float32]:
        """Each turn's value [m] at its action tokens, [T]; 0 at all others."""
        if not len(values):
            return np.zeros(len(tokens.token_ids), np.float32)
        at_tokens = np.repeat(values.astype(np.float32), self._reach(len(tokens.token_ids)))
        return at_tokens * tokens.actions()

    def _reach(self, num_tokens: int) -> Ints:
        """Tokens from each turn's start to the next one's; the first has what is before it too."""
        reach = np.diff(self.starts, append=num_tokens)
        reach[0] += self.starts[0]
        return reach

    def to_go(self, values: Floats, gamma: float) -> Floats:
        """At each turn sum gamma^(j - k) values[j] over itself and the turns of its row that follow, [m]."""
        found = values.copy()
        followed = np.append(self.owners[1:] == self.owners[:-1], False)[: len(values)]
        for k in np.flatnonzero(followed)[::-1]:
            found[k] += gamma * found[k + 1]
        return found


def _recorded(rows: pa.Table, tokens: Tokens) -> tuple[Ints, Floats]:
    """First tokens among all, and process rewards, of the turns in column `turns`."""
    if "turns" not in rows.column_names:
        return np.zeros(0, np.int64), np.zeros(0)
    column = rows["turns"].combine_chunks()
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    cells = column.flatten()
    begins = np.repeat(tokens.offsets[:-1], counts)
    starts = cells.field("action_start").to_numpy(zero_copy_only=False)
    places = begins + np.maximum(starts, 1)  # the first token of a row has no logprob, and is trained on by none
    inside = places < np.repeat(tokens.offsets[1:], counts)
    rewards = pc.fill_null(cells.field("reward"), 0).to_numpy(zero_copy_only=False).astype(np.float64)
    return places[inside].astype(np.int64), rewards[inside]
