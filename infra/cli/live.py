"""The demo's live view: a table that repaints on a terminal, a line every few seconds elsewhere."""

import sys
import time
from types import TracebackType

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from infra import sql
from infra.lake import Lake
from infra.watch import LoopState
from schemas.settings import Settings

LINE_S = 5.0
LAKE_S = 8.0
FIGURES = """
with recent as (select staleness_mean from train_steps order by step desc limit 20)
select (select cost_per_effective_sample from cost_per_effective_sample) as cost,
       (select avg(staleness_mean) from recent) as staleness"""


class Display:
    """Shows a LoopState; cost and staleness come from the lake every LAKE_S seconds."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lake = sql.Live(Lake.of(settings), settings.cost.accelerator_hour)
        self._live = Live(console=Console(), refresh_per_second=2, transient=True) if sys.stdout.isatty() else None
        self._started = time.monotonic()
        self._line_at = self._lake_at = 0.0
        self._cost: float | None = None
        self._staleness: float | None = None

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, type_: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        self._lake.close()

    def show(self, state: LoopState) -> None:
        """Show `state` now."""
        now = time.monotonic()
        if now - self._lake_at > LAKE_S:
            self._lake_at = now
            self._cost, self._staleness = self._lake.ask(FIGURES)[0]
        rows = self._rows(state)
        if self._live:
            self._live.update(_table(rows))
        elif now - self._line_at > LINE_S:
            self._line_at = now
            print(f"{now - self._started:5.0f} s  " + "  ".join(f"{name}: {text}" for name, text in rows), flush=True)

    def _rows(self, state: LoopState) -> list[tuple[str, str]]:
        total, currency = self._settings.learner.num_train_steps, self._settings.cost.currency
        outcomes = ", ".join(f"{n} {state.outcomes[n]:,}" for n in state.outcomes if state.outcomes[n]) or "none yet"
        staleness = "" if self._staleness is None else f", staleness {self._staleness:.1f}"
        cost = "not yet" if self._cost is None else f"{self._cost * 1e6:,.2f} {currency} per million effective samples"
        return [
            ("rollouts", f"{state.episodes:,} episodes, {state.rollout_rate.per_s:.0f}/s, {state.failed} failed"),
            ("curation", f"{outcomes}; {state.pending} in open groups"),
            (
                "learner",
                f"step {state.train_step}/{total}, {state.train_rate.per_s:.1f}/s, {state.available} ready{staleness}",
            ),
            ("evaluator", _scores(state)),
            ("cost", cost),
        ]


def _scores(state: LoopState) -> str:
    if not state.scored:
        return f"weight version {state.weight_version}, no score yet"
    first, last = state.scored[0], state.scored[-1]
    return (
        f"score {last.score:.3f} [{last.low:.2f}, {last.high:.2f}] at version {last.end_version} of "
        f"{state.weight_version} (first {first.score:.3f})"
    )


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    for name, text in rows:
        table.add_row(name, text)
    return table
