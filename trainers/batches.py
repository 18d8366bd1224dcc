"""Token columns to tensors: length-sorted micro-batches, padded, aligned for next-token prediction."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token columns of n rows, laid end to end: row i is [offsets[i], offsets[i + 1]) of the three flat arrays."""

    offsets: Ints
    token_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]

    @classmethod
    def of(cls, rows: pa.Table) -> "Tokens":
        """The token columns of `rows`; only the mask is copied, whose bits Arrow packs."""
        lists = [rows.column(name).combine_chunks() for name in ("token_ids", "action_mask", "behavior_logprobs")]
        lengths = pc.list_value_length(lists[0]).to_numpy(zero_copy_only=False)
        ids, mask, behavior = (column.flatten() for column in lists)
        return cls(_offsets(lengths), ids.to_numpy(), _unpack(mask), behavior.to_numpy())

    @classmethod
    def gather(cls, places: Sequence[tuple["Tokens", int]]) -> "Tokens":
        """The rows (tokens, index), in that order."""
        slices = [(tokens, *tokens.offsets[i : i + 2].tolist()) for tokens, i in places]
        return cls(
            _offsets(np.array([end - start for _, start, end in slices], np.int64)),
            np.concatenate([t.token_ids[start:end] for t, start, end in slices]),
            np.concatenate([t.action_mask[start:end] for t, start, end in slices]),
            np.concatenate([t.behavior_logprobs[start:end] for t, start, end in slices]),
        )

    @property
    def lengths(self) -> Ints:
        """Tokens of each row."""
        return np.diff(self.offsets)

    def take(self, order: Sequence[int]) -> "Tokens":
        """The rows `order`, at least one, in that order."""
        return Tokens.gather([(self, i) for i in order])

    def slice(self, start: int, end: int) -> "Tokens":
        """Rows [start, end), without a copy."""
        offsets = self.offsets[start : end + 1]
        span = slice(offsets[0], offsets[-1])
        moved = offsets - offsets[0]
        return Tokens(moved, self.token_ids[span], self.action_mask[span], self.behavior_logprobs[span])

    def actions(self) -> NDArray[np.bool_]:
        """Flat mask of the action tokens that have a logprob: the first token of a row has none."""
        mask = self.action_mask.copy()
        mask[self.offsets[:-1][self.lengths > 0]] = False
        return mask


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of similar length. Position j of the shifted mask belongs to token j + 1, which token j's logits predict.

    `rows` int64 [b]: places in the batch. `token_ids` int32 [b, t], right-padded (under a causal mask padding changes
    nothing). `action_mask` bool [b, t-1]; `lengths` int64 [b], without padding; the rest per action token, [n], in
    row-major order of the mask: `turns` int64 are numbers of turns in the global batch.
    """

    rows: Tensor
    token_ids: Tensor
    action_mask: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    owners: Tensor
    turns: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`."""
        return MicroBatch(*(getattr(self, name).to(device, non_blocking=True) for name in self.__slots__))


def spread(values: Floats, tokens: Tokens) -> NDArray[np.float32]:
    """Each row's value [n] at all of its tokens, [T]."""
    return np.repeat(values.astype(np.float32), tokens.lengths)


def num_action_tokens(tokens: Tokens) -> Ints:
    """Action tokens [n] that have a logprob."""
    counts = np.concatenate([[0], np.cumsum(tokens.actions())])
    return counts[tokens.offsets[1:]] - counts[tokens.offsets[:-1]]


def rank_batches(
    tokens: Tokens, advantages: NDArray[np.float32], parts: int, rank: int, size: int, turns: Ints | None = None
) -> Iterator[MicroBatch]:
    """The micro-batches of rank `rank` of `size`: every size-th row by length, so that all have about as much to do.

    `advantages` and `turns` [T] have one for each token of `tokens`; without `turns` a row is a turn. `rows` of the
    micro-batches are places in the global batch.
    """
    if turns is None:
        turns = np.repeat(np.arange(len(tokens.lengths)), tokens.lengths)
    order = np.argsort(tokens.lengths, kind="stable")[rank::size]
    if not np.array_equal(order, np.arange(len(tokens.lengths))):
        advantages, turns = (_reordered(x, tokens.offsets, order) for x in (advantages, turns))
        tokens = tokens.take(order.tolist())
    for part in np.array_split(np.arange(len(order)), parts):
        start, end = (int(part[0]), int(part[-1]) + 1) if len(part) else (0, 0)
        span = slice(tokens.offsets[start], tokens.offsets[end])
        yield _micro_batch(tokens.slice(start, end), order[part], advantages[span], turns[span])


def micro_batches(tokens: Tokens, advantages: NDArray[np.float32], parts: int) -> Iterator[MicroBatch]:
    """The rows as exactly `parts` micro-batches of similar length, shortest first.

    The count does not depend on the content, because every rank has to call backward equally often.
    """
    return rank_batches(tokens, advantages, parts, 0, 1)


def _reordered(values: NDArray[Any], bounds: Ints, order: Ints) -> NDArray[Any]:
    """The stretches of `values` that belong to the rows `order`, in that order."""
    return np.concatenate([values[:0], *(values[bounds[i] : bounds[i + 1]] for i in order)])


def _micro_batch(tokens: Tokens, rows: Ints, advantages: NDArray[np.float32], turns: Ints) -> MicroBatch:
    actions, bounds = tokens.actions(), tokens.offsets.tolist()
    width = max(int(tokens.lengths.max(initial=0)), 2)
    ids = np.zeros((len(rows), width), np.int32)
    mask = np.zeros((len(rows), width), np.bool_)
    for row, (start, end) in enumerate(pairwise(bounds)):
        ids[row, : end - start] = tokens.token_ids[start:end]
        mask[row, : end - start] = actions[start:end]
    return MicroBatch(
        rows=torch.from_numpy(rows),
        token_ids=torch.from_numpy(ids),
        action_mask=torch.from_numpy(mask[:, 1:]),
        behavior_logprobs=torch.from_numpy(tokens.behavior_logprobs[actions]),
        advantages=torch.from_numpy(advantages[actions]),
        owners=torch.from_numpy(np.repeat(np.arange(len(rows)), mask.sum(1))),
        turns=torch.from_numpy(turns[actions]),
        lengths=torch.from_numpy(tokens.lengths),
    )


def _unpack(mask: pa.BooleanArray) -> NDArray[np.bool_]:
    """Booleans from Arrow's bits; six times as fast as its own conversion."""
    if mask.null_count:
        return mask.to_numpy(zero_copy_only=False).astype(np.bool_)
    bits = np.frombuffer(mask.buffers()[1], np.uint8)[mask.offset // 8 :] if len(mask) else np.zeros(0, np.uint8)
    skip = mask.offset % 8
    return np.unpackbits(bits, count=skip + len(mask), bitorder="little")[skip:].view(np.bool_)


def _offsets(lengths: NDArray[np.integer]) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
