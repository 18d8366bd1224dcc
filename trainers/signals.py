"""What the rows of a batch say besides their tokens: advantages, successes, preferences between siblings."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.names import Status
from schemas.settings import Settings
from trainers.batches import Tokens, num_action_tokens, spread
from trainers.credit import Floats, row_advantages

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Signals:
    """Of a batch of n rows with T tokens in all.

    `advantages` float32 [T], one a token; `kept` bool [n], rows that are learned from; `success_weights` float32 [n],
    whose mean over action tokens is 1 if any row succeeded; `chosen` and `rejected` int64 [p], pairs of siblings.
    """

    advantages: NDArray[np.float32]
    kept: NDArray[np.bool_]
    success_weights: NDArray[np.float32]
    chosen: Ints
    rejected: Ints


def signals(rows: pa.Table, tokens: Tokens, settings: Settings) -> Signals:
    """The signals of `rows`, whose tokens are `tokens`."""
    rewards: Floats = rows.column("reward").cast(pa.float64()).to_numpy()
    kept = np.ones(rows.num_rows, np.bool_)
    if settings.objective.mask_truncated:
        kept = np.array(rows.column("status").to_pylist()) != Status.TRUNCATED
    chosen, rejected = pairs(rows.column("group_id").to_pylist(), rewards)
    successes = rewards >= settings.loop.success_reward
    return Signals(
        advantages=spread(row_advantages(rows), tokens),
        kept=kept,
        success_weights=_success_weights(successes, num_action_tokens(tokens)),
        chosen=chosen,
        rejected=rejected,
    )


def pairs(group_ids: list[str], rewards: Floats) -> tuple[Ints, Ints]:
    """Of each group in the batch its best and its worst row, where they differ: int64 [p], [p]."""
    groups: dict[str, list[int]] = defaultdict(list)
    for row, group_id in enumerate(group_ids):
        if np.isfinite(rewards[row]):
            groups[group_id].append(row)
    ends = [(max(rows, key=rewards.__getitem__), min(rows, key=rewards.__getitem__)) for rows in groups.values()]
    found = [(best, worst) for best, worst in ends if rewards[best] > rewards[worst]]
    table = np.array(found, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _success_weights(successes: NDArray[np.bool_], num_tokens: Ints) -> NDArray[np.float32]:
    of_successes = int(num_tokens[successes].sum())
    return (successes * (num_tokens.sum() / max(of_successes, 1))).astype(np.float32)
