"""Token columns to tensors: length-sorted micro-batches, padded, aligned for next-token prediction."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainers.credit import Floats, group_advantages

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
        flat = [column.flatten().to_numpy(zero_copy_only=False) for column in lists]
        return cls(_offsets(lengths), *flat)

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

    def actions(self) -> NDArray[np.bool_]:
        """Flat mask of the action tokens that have a logprob: the first token of a row has none."""
        mask = self.action_mask.copy()
        mask[self.offsets[:-1][self.lengths > 0]] = False
        return mask


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of similar length. Position j of the shifted mask belongs to token j + 1, which token j's logits predict.

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
    return group_advantages(*(rows.column(name).cast(pa.float64()).to_numpy() for name in names))


def num_action_tokens(tokens: Tokens) -> Ints:
    """Action tokens [n] that have a logprob."""
    counts = np.concatenate([[0], np.cumsum(tokens.actions())])
    return counts[tokens.offsets[1:]] - counts[tokens.offsets[:-1]]


def rank_batches(tokens: Tokens, advantages: Floats, parts: int, rank: int, size: int) -> Iterator[MicroBatch]:
    """The micro-batches of rank `rank` of `size`: every size-th row by length, so that all have about as much to do.

    `rows` of the micro-batches are places in the global batch.
    """
    mine = np.argsort(tokens.lengths, kind="stable")[rank::size]
    return _parts(tokens, advantages, mine, parts)


def micro_batches(tokens: Tokens, advantages: Floats, parts: int) -> Iterator[MicroBatch]:
    """The rows as exactly `parts` micro-batches of similar length, shortest first.

    The count does not depend on the content, because every rank has to call backward equally often.
    """
    return rank_batches(tokens, advantages, parts, 0, 1)


def _parts(tokens: Tokens, advantages: Floats, order: Ints, parts: int) -> Iterator[MicroBatch]:
    actions = tokens.actions()
    for rows in np.array_split(order, parts):
        yield _micro_batch(tokens, actions, rows, advantages[rows].astype(np.float32))


def _micro_batch(tokens: Tokens, actions: NDArray[np.bool_], rows: Ints, advantages: NDArray[np.float32]) -> MicroBatch:
    bounds = list(zip(tokens.offsets[rows].tolist(), tokens.offsets[rows + 1].tolist(), strict=True))
    width = max((end - start for start, end in bounds), default=2)
    ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), np.bool_)
    behavior = [tokens.behavior_logprobs[:0]]
    for row, (start, end) in enumerate(bounds):
        ids[row, : end - start] = tokens.token_ids[start:end]
        mask[row, : end - start] = actions[start:end]
        behavior.append(tokens.behavior_logprobs[start:end][actions[start:end]])
    counts = [len(x) for x in behavior[1:]]
    return MicroBatch(
        rows=torch.from_numpy(rows),
        token_ids=torch.from_numpy(ids),
        action_mask=torch.from_numpy(mask[:, 1:]),
        behavior_logprobs=torch.from_numpy(np.concatenate(behavior)),
        advantages=torch.from_numpy(np.repeat(advantages, counts)),
        owners=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
    )


def _offsets(lengths: NDArray[np.integer]) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
