"""Live rows, and groups of them: what a draw goes by, and the probability that it gives."""

import math
from dataclasses import dataclass, field
from hashlib import blake2b

import pyarrow as pa

from trainers.batches import Tokens

FLOOR = 0.01
"""Added to a priority, so that a group of none is drawn at times (prioritized experience replay, section 3.3)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that came together: scalar columns as Arrow, token columns as arrays."""

    rows: pa.Table
    tokens: Tokens


@dataclass(slots=True, eq=False)
class Live:
    """A trajectory in the buffer: row `index` of `chunk`, the `arrival`-th that came. `uses` counts its batches."""

    trajectory_id: str
    group_id: str
    min_weight_version: int
    bucket: int
    delta_version: int
    chunk: Chunk
    index: int
    num_tokens: int
    arrival: int
    uses: int = 0


@dataclass(slots=True, eq=False)
class Siblings:
    """The live rows of a group. They are drawn together, as of their newest row's bucket, by their mean priority.

    Picking rows by their own priority would train on the rare outcome of a group without its counterweight; picking
    them by their own bucket would part the siblings that took longer from those that were quick. `rest_of` is the
    probability of the draw that a batch's end cut in two: what it left goes first in the next one.
    """

    group_id: str
    priority: float
    length: int
    rows: list[Live] = field(default_factory=list)
    rest_of: float | None = None

    @property
    def bucket(self) -> int:
        """The version bucket that the group is drawn from; `rows` lie by version, the newest last."""
        return self.rows[-1].bucket

    def weight(self, exponent: float) -> float:
        """How likely the group is drawn, relative to others: (priority + FLOOR)^exponent."""
        return (max(self.priority, 0.0) + FLOOR) ** exponent

    def ring(self, number: int, exponent: float) -> float:
        """When the group's alarm goes off in draw `number`, as a time ~ Exp(weight); the first ones are drawn.

        That is weighted sampling without replacement: Efraimidis and Spirakis 2006, "Weighted random sampling with a
        reservoir". The time is a function of group and number alone.
        """
        if self.rest_of is not None:
            return 0.0
        digest = blake2b(f"{number}/{self.group_id}".encode(), digest_size=8).digest()
        return -math.log((int.from_bytes(digest, "big") + 1) / 2**64) / self.weight(exponent)

    def probability(self, until: float, exponent: float) -> float:
        """The probability that its alarm goes off before `until`, that of the first group which was not drawn.

        1 - exp(-weight * until): exact given the other groups' alarms, so that a sum over drawn rows of x / probability
        expects the sum over all. Source: Cohen and Kaplan 2007, "Summarizing data using bottom-k sketches", section 4.
        """
        return self.rest_of if self.rest_of is not None else -math.expm1(-self.weight(exponent) * until)
