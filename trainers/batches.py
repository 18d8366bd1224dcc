"""Arrow rows to tensors: length-sorted micro-batches, padded, aligned for next-token prediction."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainers.credit import Floats, group_advantages

TOKEN_COLUMNS = ("token_ids", "action_mask", "behavior_logprobs")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of similar length. Position j of the shifted tensors belongs to token j + 1, which token j's logits predict.

    `rows` int64 [b]: places in the batch. `token_ids` int64 [b, t], right-padded (under a causal mask padding changes
    nothing). `action_mask` bool [b, t-1]; the rest per action token, [n], in row-major order of the mask.
    """

    rows: Tensor
    token_ids: Tensor
    action_mask: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    owners: Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`."""
        return MicroBatch(*(getattr(self, name).to(device, non_blocking=True) for name in self.__slots__))


def row_advantages(rows: pa.Table) -> Floats:
    """Advantages [n] of `rows`, each from its own group columns."""
    names = ("reward", "group_reward_mean", "group_reward_std")
    return group_advantages(*(_floats(rows.column(name)) for name in names))


def num_action_tokens(rows: pa.Table) -> NDArray[np.int64]:
    """Action tokens [n] that have a logprob (the first token of a row has none)."""
    offsets, flat = _flat(rows.column("action_mask"))
    starts, ends = offsets[:-1], offsets[1:]
    counts = np.concatenate([[0], np.cumsum(flat)])
    return (counts[ends] - counts[np.minimum(starts + 1, ends)]).astype(np.int64)


def micro_batches(rows: pa.Table, advantages: Floats, parts: int, pad: int = 0) -> Iterator[MicroBatch]:
    """`rows` as exactly `parts` micro-batches of similar length, shortest first.

    The count does not depend on the content, because every rank has to call backward equally often.
    """
    lengths = pc.list_value_length(rows.column("token_ids")).to_numpy()
    order = np.argsort(lengths, kind="stable")
    columns = [_flat(rows.column(name).take(pa.array(order))) for name in TOKEN_COLUMNS]
    for part in np.array_split(np.arange(len(order)), parts):
        yield _micro_batch(order[part], part, columns, advantages, pad)


def rank_batches(rows: pa.Table, advantages: Floats, parts: int, rank: int, size: int) -> Iterator[MicroBatch]:
    """The micro-batches of rank `rank` of `size`: every size-th row by length, so that all have about as much to do.

    `rows` of the micro-batches are places in the global batch.
    """
    lengths = pc.list_value_length(rows.column("token_ids")).to_numpy()
    mine = np.argsort(lengths, kind="stable")[rank::size]
    for batch in micro_batches(rows.take(pa.array(mine)), advantages[mine], parts):
        yield replace(batch, rows=torch.from_numpy(mine)[batch.rows])


def _micro_batch(
    rows: NDArray[np.int64],
    part: NDArray[np.int64],
    columns: list[tuple[NDArray[np.int64], NDArray[np.generic]]],
    advantages: Floats,
    pad: int,
) -> MicroBatch:
    ids, mask, behavior = (_pad(*column, part, fill) for column, fill in zip(columns, (pad, False, 0), strict=True))
    actions = mask[:, 1:].astype(bool)
    owners = np.repeat(np.arange(len(rows)), actions.sum(1))
    return MicroBatch(
        rows=torch.from_numpy(rows),
        token_ids=torch.from_numpy(ids.astype(np.int64)),
        action_mask=torch.from_numpy(actions),
        behavior_logprobs=torch.from_numpy(behavior[:, 1:][actions].astype(np.float32)),
        advantages=torch.from_numpy(advantages[rows].astype(np.float32)[owners]),
        owners=torch.from_numpy(owners),
    )


def _pad(offsets: NDArray[np.int64], flat: NDArray[np.generic], part: NDArray[np.int64], fill: float) -> NDArray:
    starts, ends = offsets[part], offsets[part + 1]
    lengths = ends - starts
    width = max(int(lengths.max(initial=0)), 2)
    padded = np.full((len(part), width), fill, flat.dtype)
    if len(part):
        padded[np.arange(width) < lengths[:, None]] = flat[starts[0] : ends[-1]]
    return padded


def _flat(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], NDArray[np.generic]]:
    """Offsets [n+1] from 0, and values, of a list column."""
    array = column.combine_chunks()
    lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths)]), array.flatten().to_numpy(zero_copy_only=False)


def _floats(column: pa.ChunkedArray) -> Floats:
    return column.cast(pa.float64()).to_numpy()
