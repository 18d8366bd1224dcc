"""Numpy views of a batch's columns, for rules that look at many tokens at once."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.integer]


class Lists:
    """A list column: `values` end to end, row i being values[offsets[i]:offsets[i + 1]]."""

    def __init__(self, column: pa.ListArray) -> None:
        self.values: pa.Array = column.flatten()
        self.lengths: Ints = numbers(pc.list_value_length(column)).astype(np.int64)
        self.offsets: Ints = np.concatenate([[0], np.cumsum(self.lengths)])

    def any_by_row(self, mask: Mask) -> Mask:
        """Per row, whether `mask` (one entry per value) is true anywhere in it."""
        if not mask.any():
            return np.zeros(len(self.lengths), np.bool_)
        return self.count_by_row(mask) > 0

    def count_by_row(self, mask: Mask) -> Ints:
        """Per row, how often `mask` (one entry per value) is true in it."""
        counts = np.concatenate([[0], np.cumsum(mask)])
        return counts[self.offsets[1:]] - counts[self.offsets[:-1]]

    def per_value(self, by_row: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`by_row` repeated for every value of its row."""
        return np.repeat(by_row, self.lengths)

    def child(self, name: str) -> pa.Array:
        """Field `name` of the structs in `values`."""
        return pc.struct_field(self.values, name)


class Columns:
    """The columns of `rows` as numpy arrays and flattened lists, each made when first asked for."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self.rows = rows
        self._lists: dict[str, Lists] = {}

    def __len__(self) -> int:
        return self.rows.num_rows

    def __getitem__(self, name: str) -> pa.Array:
        return self.rows.column(name)

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """Column `name`; nulls become NaN, or 0 in a boolean column."""
        return numbers(self.rows.column(name))

    def lists(self, name: str) -> Lists:
        """List column `name`, flattened."""
        if name not in self._lists:
            self._lists[name] = Lists(self.rows.column(name))
        return self._lists[name]

    @cached_property
    def num_actions(self) -> Ints:
        """Action tokens of each row."""
        offsets = self.lists("action_mask").offsets
        return self._actions_between(offsets[:-1], offsets[1:])

    @cached_property
    def num_actions_by_span(self) -> Ints:
        """Action tokens of each weight version span, over the spans of all rows."""
        spans, tokens = self.lists("weight_version_spans"), self.lists("action_mask")
        row, length = spans.per_value(tokens.offsets[:-1]), spans.per_value(tokens.lengths)
        start = np.clip(numbers(spans.child("start")).astype(np.int64), 0, length)
        end = np.clip(numbers(spans.child("end")).astype(np.int64), start, length)
        return self._actions_between(row + start, row + end)

    @cached_property
    def actions(self) -> Mask:
        """`action_mask` of all rows, end to end."""
        return numbers(self.lists("action_mask").values).astype(np.bool_)

    @cached_property
    def _places_of_actions(self) -> Ints:
        return np.flatnonzero(self.actions)

    def _actions_between(self, start: Ints, end: Ints) -> Ints:
        return np.searchsorted(self._places_of_actions, end) - np.searchsorted(self._places_of_actions, start)


def numbers(array: pa.Array) -> npt.NDArray[Any]:
    """`array` as numpy; nulls become NaN."""
    return array.to_numpy(zero_copy_only=False)


def is_one_of(array: pa.Array, words: list[str]) -> Mask:
    """Where `array` is null or one of `words`."""
    return numbers(pc.or_(pc.is_in(array, pa.array(words)), pc.is_null(array))).astype(np.bool_)


def matches(array: pa.Array, pattern: str, max_length: int = 256) -> Mask:
    """Where the whole of `array`'s text matches `pattern` (RE2) and is not too long, or is null.

    A bound on the length inside the pattern would make the automaton large and slow.
    """
    found = pc.and_(
        pc.match_substring_regex(array, f"^(?:{pattern})$"), pc.less_equal(pc.utf8_length(array), max_length)
    )
    return numbers(pc.fill_null(found, True)).astype(np.bool_)
