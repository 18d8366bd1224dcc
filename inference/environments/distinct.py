"""Numbered tasks of which no two are the same: otherwise one of them could be held out and the other trained on."""

from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Distinct(Generic[T]):
    """The different ones of what is drawn, in order, drawn as far as it was asked for: an index never moves.

    Args:
        drawn: Where they come from; the same in every process.
        asks: What makes two of them the same task.
        repeats: After so many in a row that are no new ones, there are no others.
    """

    def __init__(self, drawn: Iterator[T], asks: Callable[[T], Hashable], repeats: int) -> None:
        self._drawn, self._asks, self._repeats = drawn, asks, repeats
        self._found: list[T] = []
        self._seen: set[Hashable] = set()

    def __len__(self) -> int:
        """How many were found so far."""
        return len(self._found)

    def get(self, index: int) -> T | None:
        """The one at `index`; None if there are fewer."""
        while len(self._found) <= index:
            new = next((d for d in islice(self._drawn, self._repeats) if self._asks(d) not in self._seen), None)
            if new is None:
                self._drawn = iter(())
                return None
            self._seen.add(self._asks(new))
            self._found.append(new)
        return self._found[index]
