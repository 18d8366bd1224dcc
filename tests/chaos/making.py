"""Groups of known fate: what the record says of each member holds whatever dies on the way.

Certain because of how they are made: staleness is 0, or far above the bound; a duplicate follows its original in the
same group, and a group's messages keep their order; whole groups close by their last member, not by the clock.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from schemas.ids import content_hash
from schemas.settings import Settings
from schemas.trajectory import Trajectory, WeightVersionSpan
from tests.chaos.record import Entry, Fate
from tests.samples import group, uid

MADE_SIZE = 4
"""Members of a group; `settings` below asks curate for the same."""

OLD = 10
"""Versions by which what must be stale lags; far above the bound that `settings` sets."""

FIRST_VERSION = OLD + 1
TASKS = 61
MIXED = (0.0, 1.0, 1.0, 0.0)

Made = tuple[Trajectory, Fate]


def settings(folder: Path, brokers: str, sink_partitions: int = 2, **sections: dict[str, object]) -> Settings:
    """Settings under which the fates hold: no group closes by the clock, the bound is below OLD.

    `sections` add to these.
    """
    own: dict[str, dict[str, object]] = {
        "run": {"name": "chaos", "data_dir": str(folder)},
        "kafka": {"brokers": brokers, "topic_prefix": "chaos."},
        "lake": {"sink_partitions": sink_partitions},
        "loop": {"group_size": MADE_SIZE, "batch_size": 4 * MADE_SIZE, "max_staleness": 3},
        "dispatch": {"lease_s": 900},
        "curate": {"epoch_s": 0.3, "group_timeout_s": 600},
    }
    return Settings.model_validate({name: own.get(name, {}) | sections.get(name, {}) for name in {*own, *sections}})


def admitted(name: object, version: int) -> list[Made]:
    """A whole group with mixed rewards."""
    return [(t, Fate.ADMITTED) for t in _group(name, MIXED, version)]


def stale(name: object, version: int) -> list[Made]:
    """A whole group from long ago."""
    return [(t, Fate.STALE) for t in _group(name, MIXED, version - OLD)]


def partly_stale(name: object, version: int) -> list[Made]:
    """Two members from long ago, two of now."""
    old, new = _group(name, MIXED, version - OLD), _group(name, MIXED, version)
    return [(t, Fate.STALE) for t in old[:2]] + [(t, Fate.ADMITTED) for t in new[2:]]


def no_signal(name: object, version: int) -> list[Made]:
    """Rewards that are all equal."""
    return [(t, Fate.NO_SIGNAL) for t in _group(name, (1.0,) * MADE_SIZE, version)]


def failed(name: object, version: int) -> list[Made]:
    """One member whose infrastructure failed."""
    made = _group(name, (0.0, None, 1.0, 0.0), version)
    return [(t, Fate.NO_SIGNAL if t.reward is None else Fate.ADMITTED) for t in made]


def invalid(name: object, version: int) -> list[Made]:
    """One member with a reward that is no number."""
    broken = [dataclasses.replace(t, reward=float("nan")) if not i else t for i, t in enumerate(_whole(name, version))]
    return [(t, Fate.ADMITTED if i else Fate.INVALID) for i, t in enumerate(broken)]


def duplicate(name: object, version: int) -> list[Made]:
    """A whole group, then a second trajectory for one of its places, as a task that was issued again brings."""
    again = dataclasses.replace(_whole(name, version)[1], trajectory_id=uid("again", name), attempt=2)
    return [*admitted(name, version), (again, Fate.DUPLICATE)]


def repeated(name: object, version: int) -> list[Made]:
    """A whole group, then one of its trajectories once more, id and all."""
    return [*admitted(name, version), (_whole(name, version)[2], Fate.DUPLICATE)]


def dead_letter(name: object, version: int) -> list[Made]:
    """A group whose messages nobody can read; the sender spoils their bodies on the way."""
    return [(t, Fate.DEAD_LETTER) for t in _whole(name, version)]


KINDS: dict[str, Callable[[object, int], list[Made]]] = {
    make.__name__: make
    for make in (admitted, stale, partly_stale, no_signal, failed, invalid, duplicate, repeated, dead_letter)
}


def kind_of(seed: int, number: int) -> str:
    """The kind of group `number`: one in two is plain."""
    chance = random.Random(f"{seed}/{number}")
    return "admitted" if chance.random() < 0.5 else chance.choice(list(KINDS))


def make(seed: int, kind: str, number: int, version: int) -> list[tuple[Trajectory, Entry]]:
    """Group `number`: the same for the same arguments, so that what a kill has cut off can be made again."""
    return [
        (t, Entry(t.trajectory_id, t.group_id, t.group_index, len(t.token_ids), fate, number, kind, version))
        for t, fate in KINDS[kind](("chaos", seed, number), version)
    ]


def _whole(name: object, version: int) -> list[Trajectory]:
    return _group(name, MIXED, version)


def _group(name: object, rewards: Sequence[float | None], version: int) -> list[Trajectory]:
    task = f"add/{random.Random(repr(name)).randrange(TASKS)}"
    return [_sized(t, repr(name)) for t in group(name, rewards, task_id=task, version=version)]


def _sized(made: Trajectory, name: str) -> Trajectory:
    """`made` with more tokens, a number of its own, so that a mix-up does not cancel out."""
    extra = random.Random(f"{name}/{made.group_index}").randrange(40)
    tokens = (*made.token_ids, *range(extra))
    spans = (WeightVersionSpan(0, len(tokens), made.min_weight_version),)
    return dataclasses.replace(
        made,
        token_ids=tokens,
        action_mask=(*made.action_mask, *[False] * extra),
        behavior_logprobs=(*made.behavior_logprobs, *[0.0] * extra),
        weight_version_spans=spans,
        content_hash=content_hash(made.task_id, list(tokens), [(s.start, s.end, s.version) for s in spans]),
    )
