"""Token columns to tensors: length-sorted micro-batches, padded or packed, aligned for next-token prediction."""

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
    """k rows in l lines of t tokens. Position j of the shifted mask belongs to token j + 1, which logits of j predict.

    A line holds a row, or several end to end where `position_ids` int64 [l, t] begin at 0 with each. What is left of it
    is padding: under a causal mask it changes nothing. Without rows there is one line, of padding.

    `rows` int64 [k]: places in the batch, in row-major order. `token_ids` int32 [l, t]; `action_mask` bool [l, t-1];
    `ends` int64 [k], flat places of the rows' last tokens; the rest per action token, [n], in row-major order of the
    mask: `turns` int64 are numbers of turns in the global batch.
    """

    rows: Tensor
    token_ids: Tensor
    action_mask: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    owners: Tensor
    turns: Tensor
    ends: Tensor
    position_ids: Tensor | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`."""
        there = {name: x for name in self.__slots__ if (x := getattr(self, name)) is not None}
        return MicroBatch(**{name: x.to(device, non_blocking=True) for name, x in there.items()})


Part = list[list[int]]
"""Lines of a micro-batch, each the rows that it holds, by their places in the global batch."""


@dataclass(frozen=True, slots=True)
class Split:
    """How rows become micro-batches: `parts` of equally many lines, shortest first.

    With `most_tokens` there are as many as it takes for none to have more tokens, padding included; a longer row is
    alone. With `packing` a line holds what fits into the length of the longest row, first fit, longest first.
    """

    parts: int = 1
    most_tokens: int = 0
    packing: bool = False

    def of(self, lengths: Ints, rank: int, size: int) -> list[Part]:
        """The micro-batches of rank `rank` of `size`: as many for every rank, the last ones empty if need be."""
        order = np.argsort(lengths, kind="stable")
        if not self.most_tokens:
            lines = self._lines(order[rank::size], lengths)
            return [[lines[i] for i in part] for part in np.array_split(np.arange(len(lines)), self.parts)]
        parts = [self._filled(self._lines(order[r::size], lengths), lengths) for r in range(size)]
        return parts[rank] + [[] for _ in range(max(map(len, parts)) - len(parts[rank]))]

    def _lines(self, order: Ints, lengths: Ints) -> Part:
        if not self.packing:
            return [[row] for row in order.tolist()]
        lines, room = Part(), list[int]()
        for row in order[::-1].tolist():
            found = next((i for i, free in enumerate(room) if free >= lengths[row]), len(lines))
            if found == len(lines):
                lines.append([])
                room.append(int(lengths[order[-1]]))
            lines[found].append(row)
            room[found] -= int(lengths[row])
        return [lines[i] for i in np.argsort(room, kind="stable")[::-1]]

    def _filled(self, lines: Part, lengths: Ints) -> list[Part]:
        parts: list[Part] = [[]]
        for line in lines:
            if parts[-1] and (len(parts[-1]) + 1) * int(lengths[line].sum()) > self.most_tokens:
                parts.append([])
            parts[-1].append(line)
        return parts


def num_action_tokens(tokens: Tokens) -> Ints:
    """Action tokens [n] that have a logprob."""
    return np.diff(np.searchsorted(np.flatnonzero(tokens.actions()), tokens.offsets))


def rank_batches(
    tokens: Tokens, advantages: NDArray[np.float32], split: Split, rank: int, size: int, turns: Ints | None = None
) -> Iterator[MicroBatch]:
    """The micro-batches of rank `rank` of `size`: every size-th row by length, so that all have about as much to do.

    `advantages` and `turns` [T] have one for each token of `tokens`; without `turns` a row is a turn. `rows` of the
    micro-batches are places in the global batch. All ranks get equally many, because all call backward equally often.
    """
    if turns is None:
        turns = np.repeat(np.arange(len(tokens.lengths)), tokens.lengths)
    parts = split.of(tokens.lengths, rank, size)
    order = np.array([row for part in parts for line in part for row in line], np.int64)
    if not np.array_equal(order, np.arange(len(tokens.lengths))):
        advantages, turns = (_reordered(x, tokens.offsets, order) for x in (advantages, turns))
        tokens = tokens.take(order.tolist())
    end = 0
    for part in parts:
        start, end = end, end + sum(len(line) for line in part)
        span = slice(tokens.offsets[start], tokens.offsets[end])
        yield _micro_batch(tokens.slice(start, end), part, advantages[span], turns[span])


def micro_batches(tokens: Tokens, advantages: NDArray[np.float32], parts: int) -> Iterator[MicroBatch]:
    """The rows as exactly `parts` micro-batches of similar length, shortest first.

    A part has no rows where there are fewer rows than parts.
    """
    return rank_batches(tokens, advantages, Split(parts), 0, 1)


def _reordered(values: NDArray[Any], bounds: Ints, order: Ints) -> NDArray[Any]:
    """The stretches of `values` that belong to the rows `order`, in that order."""
    return np.concatenate([values[:0], *(values[bounds[i] : bounds[i + 1]] for i in order)])


def _micro_batch(tokens: Tokens, lines: Part, advantages: NDArray[np.float32], turns: Ints) -> MicroBatch:
    actions, bounds, lengths = tokens.actions(), tokens.offsets.tolist(), tokens.lengths
    starts, width = _places([len(line) for line in lines], lengths)
    shape, is_packed = (max(len(lines), 1), width), len(lines) < len(lengths)
    ids, mask = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    positions = np.zeros(shape if is_packed else (0, 0), np.int64)
    flat_ids, flat_mask, flat_positions = ids.reshape(-1), mask.reshape(-1), positions.reshape(-1)
    for place, (start, end) in zip(starts.tolist(), pairwise(bounds), strict=True):
        stop = place + end - start
        flat_ids[place:stop] = tokens.token_ids[start:end]
        flat_mask[place:stop] = actions[start:end]
        if is_packed:
            flat_positions[place:stop] = np.arange(end - start)
    found = np.flatnonzero(actions)
    counts = np.searchsorted(found, tokens.offsets)
    return MicroBatch(
        rows=torch.tensor([row for line in lines for row in line], dtype=torch.int64),
        token_ids=torch.from_numpy(ids),
        action_mask=torch.from_numpy(mask[:, 1:]),
        behavior_logprobs=torch.from_numpy(tokens.behavior_logprobs[found]),
        advantages=torch.from_numpy(advantages[found]),
        owners=torch.from_numpy(np.repeat(np.arange(len(lengths)), np.diff(counts))),
        turns=torch.from_numpy(turns[found]),
        ends=torch.from_numpy(starts + lengths - 1),
        position_ids=torch.from_numpy(positions) if is_packed else None,
    )


def _places(counts: Sequence[int], lengths: Ints) -> tuple[Ints, int]:
    """Flat place of each row's first token in a grid, and the grid's width; the i-th line holds `counts[i]` rows."""
    before = np.concatenate([[0], np.cumsum(lengths)])
    firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    width = max(int(np.diff(before[firsts]).max(initial=0)), 2)
    of_line = np.repeat(np.arange(len(counts)), counts)
    return before[:-1] - before[firsts[of_line]] + of_line * width, width


def _unpack(mask: pa.BooleanArray) -> NDArray[np.bool_]:
    """Booleans from Arrow's bits, none of them null; six times as fast as its own conversion."""
    bits = np.frombuffer(mask.buffers()[1], np.uint8)[mask.offset // 8 :] if len(mask) else np.zeros(0, np.uint8)
    skip = mask.offset % 8
    return np.unpackbits(bits, count=skip + len(mask), bitorder="little")[skip:].view(np.bool_)


def _offsets(lengths: NDArray[np.integer]) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
