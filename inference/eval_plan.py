"""Which version is evaluated next, how, and on which tasks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from schemas.ids import group_id, task_id
from schemas.messages import Task
from schemas.names import Origin
from schemas.settings import Family, Settings


@dataclass(frozen=True, slots=True)
class Job:
    """Evaluate `version`; `passed_over` are versions that it overtook."""

    version: int
    kind: Literal["light", "full"]
    passed_over: tuple[int, ...]


def plan(versions: Iterable[int], last: int, last_full: int, full_every: int) -> Job | None:
    """The newest version above `last`, the last one that was judged; None where there is none.

    It is a full evaluation when a multiple of `full_every` lies in (last_full, version]: a version that is passed over
    cannot make one fall out.
    """
    waiting = sorted(v for v in versions if v > last)
    if not waiting:
        return None
    *passed_over, newest = waiting
    full = newest // full_every > last_full // full_every
    return Job(newest, "full" if full else "light", tuple(passed_over))


def held_out_tasks(settings: Settings, samples_per_family: int, now: datetime) -> list[Task]:
    """`samples_per_family` tasks of each family, each a group of one; the same for every version, seeds included.

    Only held-out tasks, in order; a family that has fewer repeats them under other seeds, one without any has none.
    """
    return [
        _task(settings, family, sample, now)
        for family in settings.families
        if family.num_tasks > family.num_train
        for sample in range(samples_per_family)
    ]


def without_held_out(families: Sequence[Family]) -> list[str]:
    """Families that cannot be evaluated."""
    return [f.name for f in families if f.num_tasks == f.num_train]


def _task(settings: Settings, family: Family, sample: int, now: datetime) -> Task:
    draw, place = divmod(sample, family.num_tasks - family.num_train)
    index = family.num_train + place
    name = task_id(family.name, index)
    return Task(
        group_id=group_id("eval", name, draw),
        group_size=1,
        task_id=name,
        family=family.name,
        index=index,
        environment=family.environment,
        options=family.options,
        seed=settings.run.seed,
        draw=draw,
        origin=Origin.EVAL,
        dispatched_at=now,
        lease_until=now,
    )
