"""What chaos did, and what it broke: a row per victim."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.verdict import Verdict

HEAD = ("victim", "kills", "lost", "duplicated", "unexplained", "recovery p50", "recovery max")


@dataclass
class Row:
    """Kills of one victim, what they broke (in trajectories, steps or versions), and seconds to recover from each."""

    victim: str
    kills: int = 0
    lost: int = 0
    duplicated: int = 0
    unexplained: int = 0
    recoveries_s: list[float] = field(default_factory=list)

    def add(self, verdict: Verdict) -> "Row":
        """This row with what `verdict` found."""
        self.lost += verdict.lost
        self.duplicated += verdict.duplicated
        self.unexplained += verdict.unexplained
        return self


def merge(rows: Sequence[Row]) -> list[Row]:
    """One row per victim, in the order in which they first come."""
    found: dict[str, Row] = {}
    for row in rows:
        total = found.setdefault(row.victim, Row(row.victim))
        total.kills += row.kills
        total.lost += row.lost
        total.duplicated += row.duplicated
        total.unexplained += row.unexplained
        total.recoveries_s += row.recoveries_s
    return list(found.values())


def passed(rows: Sequence[Row]) -> bool:
    """Whether nothing was lost, duplicated or left unexplained."""
    return not any(row.lost or row.duplicated or row.unexplained for row in rows)


def render(rows: Sequence[Row]) -> str:
    """The table as text, with a total; recovery times in seconds, `-` where nothing was timed."""
    total = Row("total")
    for row in rows:
        total = merge([total, Row("total", *_counts(row), recoveries_s=row.recoveries_s)])[0]
    cells = [HEAD, *map(_cells, rows), _cells(total)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    lines = ["  ".join(_aligned(line, widths)).rstrip() for line in cells]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _counts(row: Row) -> tuple[int, int, int, int]:
    return row.kills, row.lost, row.duplicated, row.unexplained


def _cells(row: Row) -> tuple[str, ...]:
    times = row.recoveries_s
    shown = (f"{statistics.median(times):.1f} s", f"{max(times):.1f} s") if times else ("-", "-")
    return (row.victim, *map(str, _counts(row)), *shown)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
