"""What Prometheus sees of curation and dispatch. Counters begin at 0 with each process; the lake has the totals."""

from collections.abc import Iterable

import pyarrow as pa
from prometheus_client import Counter, Gauge

from flows.steps.ledger import Rows
from flows.steps.supply import Supply
from schemas.messages import BufferReport, Fork
from schemas.tables import DEAD_LETTERS, GROUPS, LEDGER

TRAJECTORY_EVENTS = Counter("lagoon_trajectory_events", "Rows of the ledger", ["event"])
CLOSED_GROUPS = Counter("lagoon_closed_groups", "Rows of `groups`", ["closed_by"])
DEAD_LETTER_ROWS = Counter("lagoon_dead_letters", "Rows of `dead_letters`", ["kind"])
LIVE = Gauge("lagoon_live_trajectories", "Admitted, and neither evicted nor expired", ["shard"])
PENDING = Gauge("lagoon_pending_trajectories", "Members of groups that are still open", ["shard"])
FORKED_TURNS = Counter("lagoon_forked_turns", "Turns that branches were asked for")
DISPATCH_EVENTS = Counter("lagoon_dispatch_events", "Rows of `dispatches`", ["event"])
OPEN_GROUPS = Gauge("lagoon_open_groups", "Leases that are out")
SUPPLY_WINDOW = Gauge("lagoon_supply_window", "Trajectories that may be under way")
SUPPLY_AVAILABLE = Gauge("lagoon_supply_available", "Trajectories that the learner can still use, by its last report")

_COUNTED = {
    LEDGER.name: (TRAJECTORY_EVENTS, "event"),
    GROUPS.name: (CLOSED_GROUPS, "closed_by"),
    DEAD_LETTERS.name: (DEAD_LETTER_ROWS, "kind"),
}


def note_curated(items: Iterable[Rows | BufferReport | Fork]) -> None:
    """Count what a shard has decided."""
    for item in items:
        if isinstance(item, BufferReport):
            LIVE.labels(item.shard).set(sum(item.live.values()))
            PENDING.labels(item.shard).set(item.num_pending)
        elif isinstance(item, Fork):
            FORKED_TURNS.inc()
        elif item.table in _COUNTED:
            _count(*_COUNTED[item.table], item.batch)


def note_dispatched(rows: pa.RecordBatch | None, num_open: int, supply: Supply) -> None:
    """Count what the dispatcher has decided, and show what it goes by."""
    OPEN_GROUPS.set(num_open)
    SUPPLY_WINDOW.set(supply.window)
    SUPPLY_AVAILABLE.set(supply.available)
    if rows is not None:
        _count(DISPATCH_EVENTS, "event", rows)


def _count(counter: Counter, column: str, batch: pa.RecordBatch) -> None:
    for found in batch.column(column).value_counts().to_pylist():
        counter.labels(found["values"]).inc(found["counts"])
