"""What finishes first must not be what is learned most: each length its share of the training, as it has come.

Short episodes end at the weights that they began with; long ones come a version or two older, into buckets that are
drawn from last, and expire there. So lengths are counted as they come and as they are trained, and what a length is
owed goes before the order of buckets.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from schemas.names import Event

MEMORY = 0.9
"""What a count keeps of its weight from batch to batch: a debt that nothing in the buffer can pay is forgotten."""


def length_class(num_tokens: float) -> int:
    """Lengths of one class differ by less than a factor of two: 0 for none, k for [2^(k-1), 2^k)."""
    return int(num_tokens).bit_length()


def owed(come: Mapping[int, float], trained: Mapping[int, float]) -> dict[int, int]:
    """Trajectories by which each length class is behind: its share of what came, of all that was trained, less its own.

    Whole ones, and only of classes that are behind; they sum to less than what other classes had too much.
    """
    total = sum(come.values())
    share = sum(trained.values()) / total if total else 0.0
    debts = {length: int(share * count - trained.get(length, 0.0)) for length, count in sorted(come.items())}
    return {length: debt for length, debt in debts.items() if debt > 0}


PRODUCED = (Event.ADMITTED, Event.STALE)
"""What could have been trained on: with a signal, and in time or not."""
DROPPED = (Event.STALE, Event.EVICTED, Event.EXPIRED)


@dataclass(slots=True)
class Lengths:
    """Action tokens a trajectory of what was produced and dropped since the last `take`, by the ledger."""

    _sums: dict[str, tuple[int, int]] = field(default_factory=dict)

    def note(self, ledger: pa.Table) -> None:
        """Count rows of the ledger."""
        for name, events in (("produced", PRODUCED), ("dropped", DROPPED)):
            lengths = ledger.filter(pc.is_in(ledger["event"], pa.array(events)))["num_generated_tokens"]
            count, total = self._sums.get(name, (0, 0))
            self._sums[name] = count + len(lengths), total + (pc.sum(lengths).as_py() or 0)

    def take(self) -> dict[str, float]:
        """The means `produced_length` and `dropped_length`, where there is one; counting begins anew."""
        sums, self._sums = self._sums, {}
        return {f"{name}_length": total / count for name, (count, total) in sums.items() if count}


@dataclass(slots=True)
class Fairness:
    """Trajectories by length class, older ones with a fading weight: those that came, and those trained on."""

    come: dict[int, float] = field(default_factory=dict)
    trained: dict[int, float] = field(default_factory=dict)

    def note_come(self, counts: Mapping[int, int]) -> None:
        """These trajectories by length class may be trained on from now on."""
        for length, count in counts.items():
            self.come[length] = self.come.get(length, 0.0) + count

    def note_trained(self, counts: Mapping[int, int]) -> None:
        """A batch with these trajectories by length class is trained on."""
        lengths = self.come.keys() | counts.keys()
        self.trained = {n: MEMORY * self.trained.get(n, 0.0) + counts.get(n, 0) for n in sorted(lengths)}
        self.come = {n: MEMORY * self.come.get(n, 0.0) for n in sorted(lengths)}

    def owed(self) -> dict[int, int]:
        """By how much each length class is behind."""
        return owed(self.come, self.trained)
