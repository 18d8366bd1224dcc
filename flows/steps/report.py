"""What a shard tells the dispatcher: absolute totals, live size, closed groups, changed posteriors."""

from datetime import UTC, datetime

from flows.steps.state import State
from schemas.ids import shard_key
from schemas.messages import BufferReport, TaskPosterior

MAX_CHANGES = 2000
"""Closed groups and posteriors that one report lists at most; the rest follow with the next one."""


def report(shard: int, state: State) -> BufferReport | None:
    """The report of `shard`, if there is news. What it lists as changed is taken out of the state's tally."""
    tally = state.tally
    if not tally.changed:
        return None
    tasks = list(tally.changed_tasks)[:MAX_CHANGES]
    closed, tally.closed = tuple(tally.closed[:MAX_CHANGES]), tally.closed[MAX_CHANGES:]
    for task in tasks:
        del tally.changed_tasks[task]
    tally.changed = bool(tally.closed or tally.changed_tasks)
    return BufferReport(
        shard=shard_key(shard),
        at=datetime.fromtimestamp(state.now_ms / 1000, UTC),
        learner_version=state.learner_version,
        trajectories=dict(tally.trajectories),
        tokens=dict(tally.tokens),
        live=state.live.by_bucket(),
        num_pending=state.num_pending,
        num_branches=tally.num_branches,
        closed=closed,
        posteriors=tuple(_posterior(task, state) for task in tasks if task in state.posteriors),
    )


def _posterior(task: str, state: State) -> TaskPosterior:
    p = state.posteriors[task]
    return TaskPosterior(task_id=task, alpha=p.alpha, beta=p.beta, weight_version=p.weight_version)
