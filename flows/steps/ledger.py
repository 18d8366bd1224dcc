"""Rows of what curation decides: ledger events, closed groups, task difficulty, admitted experience."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa

from flows.steps.difficulty import Posterior
from flows.steps.groups import OpenGroup, Stats
from flows.steps.member import Member
from schemas.tables import EXPERIENCE, GROUPS, LEDGER, TASK_DIFFICULTY
from schemas.topics import TRAJECTORIES
from schemas.trajectory import TRAJECTORY_SCHEMA

DAY_MS = 86_400_000


class Rows(NamedTuple):
    """A batch of rows for a lake table."""

    table: str
    batch: pa.RecordBatch


Decision = tuple[Member, str, str | None, int, int, str | None]
"""An event in a trajectory's life: member, event, reason, learner's version, flow time in ms, directive in force."""


class Admission(NamedTuple):
    """An admitted trajectory, with what admission adds to its row."""

    member: Member
    version_bucket: int
    learner_version: int
    staleness: int
    priority: float
    is_hard: bool
    group: Stats
    forked_turns: tuple[int, ...] | None = None


class Closing(NamedTuple):
    """A group at its close."""

    group: OpenGroup
    stats: Stats
    closed_by: str
    at_version: int
    at_ms: int


class Estimate(NamedTuple):
    """A task's posterior after a change."""

    task_id: str
    task_family: str
    posterior: Posterior
    is_hard: bool
    at_ms: int


def ledger(decisions: Sequence[Decision]) -> pa.RecordBatch:
    """Rows of `ledger`, one for each decision."""
    members, events, reasons, versions, times_ms, directives = zip(*decisions, strict=True)
    columns: dict[str, Any] = dict(zip(Member._fields, zip(*members, strict=True), strict=True))
    columns |= {"event": events, "reason": reasons, "at_version": versions, "directive_id": directives}
    columns["topic"] = [TRAJECTORIES.name] * len(decisions)
    columns["at"] = _micros(times_ms)
    columns["day"] = [_day(ms // DAY_MS) for ms in times_ms]
    return _batch(LEDGER.schema, columns)


def groups(closings: Sequence[Closing]) -> pa.RecordBatch:
    """Rows of `groups`, one for each closing."""
    cells = [(c.group, c.stats, c) for c in closings]
    columns: dict[str, Callable[[OpenGroup, Stats, Closing], Any]] = {
        "group_id": lambda g, s, c: g.group_id,
        "task_id": lambda g, s, c: g.task_id,
        "task_family": lambda g, s, c: g.task_family,
        "group_size": lambda g, s, c: g.group_size,
        "num_members": lambda g, s, c: g.num_members,
        "num_rewards": lambda g, s, c: s.num_rewards,
        "reward_mean": lambda g, s, c: s.mean,
        "reward_std": lambda g, s, c: s.std,
        "pass_rate": lambda g, s, c: s.pass_rate,
        "zero_variance": lambda g, s, c: s.zero_variance,
        "num_distinct": lambda g, s, c: len(g.contents),
        "closed_by": lambda g, s, c: c.closed_by,
        "at_version": lambda g, s, c: c.at_version,
        "opened_at": lambda g, s, c: g.opened_ms * 1000,
        "closed_at": lambda g, s, c: c.at_ms * 1000,
    }
    return _batch(GROUPS.schema, {name: [cell(*x) for x in cells] for name, cell in columns.items()})


def task_difficulty(estimates: Sequence[Estimate]) -> pa.RecordBatch:
    """Rows of `task_difficulty`, one for each estimate."""
    columns: dict[str, Any] = dict(zip(Estimate._fields, zip(*estimates, strict=True), strict=True))
    posteriors: list[Posterior] = list(columns["posterior"])
    columns |= dict(zip(Posterior._fields, zip(*posteriors, strict=True), strict=True))
    columns["success_mean"] = [p.mean for p in posteriors]
    columns["at"] = _micros(columns["at_ms"])
    return _batch(TASK_DIFFICULTY.schema, columns)


def experience(payload: pa.RecordBatch, admissions: Sequence[Admission]) -> pa.RecordBatch:
    """Rows of `experience`: `payload` (row i belongs to admission i), and what admission adds."""
    added = zip(*(a[1:] for a in admissions), strict=True)
    columns: dict[str, Any] = dict(zip(Admission._fields[1:], added, strict=True))
    members = [a.member for a in admissions]
    stats: list[Stats] = list(columns["group"])
    columns |= {
        "topic": [TRAJECTORIES.name] * len(members),
        "partition": [m.partition for m in members],
        "offset": [m.offset for m in members],
        "row": [m.row for m in members],
        "ingested_at": [m.at_ms * 1000 for m in members],
        "group_reward_mean": [s.mean for s in stats],
        "group_reward_std": [s.std for s in stats],
        "group_num_rewards": [s.num_rewards for s in stats],
    }
    payloads = dict(zip(TRAJECTORY_SCHEMA.names, payload.columns, strict=True))
    return _batch(EXPERIENCE.schema, columns, payloads)


def _batch(schema: pa.Schema, columns: Mapping[str, Any], ready: Mapping[str, pa.Array] = {}) -> pa.RecordBatch:
    arrays = [ready[f.name] if f.name in ready else pa.array(columns[f.name], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _micros(times_ms: Iterable[int]) -> list[int]:
    return [ms * 1000 for ms in times_ms]


@lru_cache(4096)
def _day(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_MS // 1000, UTC).date().isoformat()
