"""The demo's last page: what happened, in figures that the lake proves."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from infra.cli import tables

OUTCOMES = ("admitted", "stale", "duplicate", "no_signal", "invalid", "dead_lettered", "in_flight")


def balances(summary: dict[str, Any]) -> bool:
    """Whether trajectories, tokens and work are all accounted for."""
    return all(row["balanced"] for row in (*summary["conservation"].values(), summary["work"]))


def show(summary: dict[str, Any], ended: str) -> None:
    """Print the summary for people; `ended` says why it ended early, if it did."""
    show_books(summary["conservation"])
    work, staleness, score = summary["work"], summary["staleness"], summary["score"]
    tables.show(
        f"groups     {work['dispatched']} dispatched = {work['closed']} closed + {work['open']} open + "
        f"{work['abandoned']} abandoned ({work['reissued']} issued again)",
        f"learning   {summary['train_steps']} train steps, {summary['weight_versions']} weight versions, "
        f"score {_number(score['first'])} -> {_number(score['last'])} (best {_number(score['best'])})",
        f"staleness  mean {staleness['mean']}, max {staleness['max']} of at most {staleness['bound']}; "
        + ", ".join(f"{count} at {age}" for age, count in staleness["histogram"].items()),
        f"samples    effective sample ratio {_number(summary['effective_sample_ratio'])}, "
        f"cost per effective sample {_number(summary['cost_per_effective_sample'], 7)}, "
        f"{summary['failed_episodes']} failed episodes kept",
        f"weights    {summary['probes']['exact']} of {summary['probes']['loads']} loads proven by logprobs, "
        f"largest difference {_number(summary['probes']['largest_difference'], 7)}",
    )
    for name, check in summary["checks"].items():
        figures = ", ".join(f"{key} {value}" for key, value in check.items() if key != "passed")
        tables.show(f"{'passed' if check['passed'] else 'FAILED'}     {name}: {figures}")
    if ended:
        tables.show(f"ended early: {ended}")


def show_books(conservation: Mapping[str, dict[str, Any]]) -> None:
    """Print where every trajectory is; what an earlier life of the run lost has a column where there is any."""
    columns = ("produced", *OUTCOMES, *(["lost"] if any(row["lost"] for row in conservation.values()) else []))
    books = [_book(kind, row, columns) for kind, row in conservation.items()]
    tables.show(tables.table(("", *columns, ""), books, "Every trajectory, in exactly one place"))


def _book(kind: str, row: dict[str, Any], columns: Sequence[str]) -> tuple[str | Text, ...]:
    figures = (f"{row[name]:,}" for name in columns)
    return (kind, *figures, tables.verdict(row["balanced"], "balanced", "NOT BALANCED"))


def _number(value: float | None, digits: int = 3) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
