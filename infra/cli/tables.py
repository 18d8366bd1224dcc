"""Tables on the terminal; wide ones stay whole where the output goes to a file or a pipe, unless COLUMNS is set."""

import os
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 240
UNBOUNDED = 100_000


def table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], title: str = "") -> Table:
    """A plain table; long cells are folded, never cut."""
    made = Table(title=title or None, box=box.SIMPLE, title_justify="left")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def show(*parts: Table | str) -> None:
    """Print tables and texts."""
    console = _console()
    for part in parts:
        console.print(part, markup=False)


def answer(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table | str:
    """Rows as a table, or, where it would be wider than the terminal, one after the other with a line a column."""
    made, console = table(columns, rows), _console()
    if console.measure(made, options=console.options.update(max_width=UNBOUNDED)).maximum <= console.width:
        return made
    width = max(map(len, columns))
    records = ["\n".join(f"{c:<{width}}  {v}" for c, v in zip(columns, row, strict=True)) for row in rows]
    return "\n\n".join(records) + "\n"


def _console() -> Console:
    """As wide as COLUMNS says, else as the terminal."""
    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").lstrip("0").isdigit()
    return Console(width=None if is_known else PIPE_WIDTH, highlight=False)


def verdict(ok: bool, good: str = "well", bad: str = "not well") -> Text:
    """A green or a red word."""
    return Text(good, style="green") if ok else Text(bad, style="bold red")
