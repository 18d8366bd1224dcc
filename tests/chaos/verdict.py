"""What a judge found."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Verdict:
    """Counts of what is wrong, and each fault in words. All zero: nothing is."""

    lost: int = 0
    duplicated: int = 0
    unexplained: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def lose(self, fault: str, count: int = 1) -> None:
        """Something is missing."""
        self.lost += count
        self.faults.append(f"lost: {fault}")

    def duplicate(self, fault: str, count: int = 1) -> None:
        """Something is there more often than it may be."""
        self.duplicated += count
        self.faults.append(f"duplicated: {fault}")

    def question(self, fault: str, count: int = 1) -> None:
        """Something is there that nothing explains, or other than it has to be."""
        self.unexplained += count
        self.faults.append(f"unexplained: {fault}")

    def expect(self, condition: bool, fault: str) -> None:
        """Question it unless `condition` holds."""
        if not condition:
            self.question(fault)

    def compare(self, what: str, expected: Counter[Any], found: Counter[Any]) -> None:
        """Each key has to be found as often as expected; one that is not expected at all is unexplained."""
        for key, count in sorted((expected - found).items(), key=repr):
            self.lose(f"{what} {_shown(key)}: {found[key]} found, {expected[key]} expected", count)
        for key, count in sorted((found - expected).items(), key=repr):
            report = self.duplicate if expected[key] else self.question
            report(f"{what} {_shown(key)}: {found[key]} found, {expected[key]} expected", count)

    def shown(self, limit: int = 20) -> str:
        """The first faults, a line each, and how many there are."""
        more = len(self.faults) - limit
        return "\n".join([*self.faults[:limit], *([f"... and {more} more faults"] if more > 0 else [])])


def _shown(key: Any) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
