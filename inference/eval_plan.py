"""Which version is evaluated next, how, and on which tasks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from schemas.messages import Task
from schemas.names import Origin
from schemas.settings import Family, Settings

Kind = Literal["light", "full"]


@dataclass(frozen=True, slots=True)
class Job:
    """Evaluate `version`; `passed_over` are versions that it overtook."""

    version: int
    kind: Kind
    passed_over: tuple[int, ...] = ()


def light(versions: Iterable[int], last: int) -> Job | None:
    """The newest version above `last`, the last one that was judged; None where there is none."""
    waiting = sorted(v for v in versions if v > last)
    return Job(waiting[-1], "light", tuple(waiting[:-1])) if waiting else None


def full(versions: Iterable[int], last: int, every: int) -> Job | None:
    """The newest version, when a multiple of `every` lies in (last, version]; `last` had the last full evaluation.

    So a version that is passed over cannot make a full evaluation fall out.
    """
    newest = max(versions, default=0)
    return Job(newest, "full") if newest // every > last // every else None


def held_out_tasks(settings: Settings, samples_per_family: int, now: datetime) -> list[Task]:
    """`samples_per_family` tasks of each family, each a group of one; the same for every version, seeds included.

    Only held-out tasks, in order; a family that has fewer repeats them under other seeds, one without any has none.
    """
    return [
        _held_out_task(settings, family, sample, now)
        for family in settings.families
        if family.num_tasks > family.num_train
        for sample in range(samples_per_family)
    ]


def training_tasks(settings: Settings, version: int, now: datetime) -> list[Task]:
    """`evaluator.train_groups_per_family` whole groups of each family, to be trained on: never held-out tasks.

    Each version goes on where the one before ended, so that in time all tasks are seen.
    """
    count, tasks = settings.evaluator.train_groups_per_family, list[Task]()
    name = settings.run.in_this_life(f"{settings.run.name}/eval")
    for family in settings.families:
        if family.weight > 0 and family.num_train:
            for number in range(version * count, (version + 1) * count):
                draw, index = divmod(number, family.num_train)
                tasks.append(_task(settings, name, family, index, draw, now, settings.loop.group_size))
    return tasks


def without_held_out(families: Sequence[Family]) -> list[str]:
    """Families that cannot be evaluated."""
    return [f.name for f in families if f.num_tasks == f.num_train]


def _held_out_task(settings: Settings, family: Family, sample: int, now: datetime) -> Task:
    draw, place = divmod(sample, family.num_tasks - family.num_train)
    return _task(settings, "eval", family, family.num_train + place, draw, now)


def _task(
    settings: Settings, run: str, family: Family, index: int, draw: int, now: datetime, group_size: int = 1
) -> Task:
    return Task.of(
        family,
        index,
        draw,
        run=run,
        group_size=group_size,
        seed=settings.run.seed,
        origin=Origin.EVAL,
        dispatched_at=now,
        lease_until=now,
    )
