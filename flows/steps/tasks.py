"""Rules about tasks. Each distinct task of a chunk is judged once."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flows.steps.columns import Columns, Mask, is_one_of
from schemas.ids import shard_of
from schemas.names import Origin
from schemas.settings import Family

SOUND, MALFORMED, UNKNOWN, HELD_OUT = range(4)
MAX_FAMILY_LENGTH, MAX_INDEX_DIGITS = 64, 9
MAX_TASK_LENGTH = MAX_FAMILY_LENGTH + 1 + MAX_INDEX_DIGITS


class TaskColumns(Columns):
    """Columns with the verdict over each row's task, for one shard and its configured families."""

    def __init__(self, rows: pa.RecordBatch, shard: int, families: Sequence[Family]) -> None:
        super().__init__(rows)
        self.shard, self.families = shard, tuple(families)
        tasks = rows.column("task_id").dictionary_encode()
        names = [t if len(t) <= MAX_TASK_LENGTH else "" for t in tasks.dictionary.to_pylist()]  # what is judged is kept
        codes = tasks.indices.to_numpy()
        sizes = _sizes(self.families)
        self.verdicts: npt.NDArray[np.int64] = np.array([_verdict(t, sizes) for t in names], np.int64)[codes]
        self.shards: npt.NDArray[np.int64] = np.array([_shard(t) for t in names], np.int64)[codes]
        self.families_of_tasks: pa.Array = pa.array([t.partition("/")[0] for t in names]).take(tasks.indices)

    def where(self, mask: Mask) -> "TaskColumns":
        """The rows for which `mask` is true."""
        return TaskColumns(self.rows.filter(pa.array(mask)), self.shard, self.families)


def malformed(c: TaskColumns) -> Mask:
    """Tasks that are not `<task_family>/<index>`."""
    differs = c.families_of_tasks.to_numpy(zero_copy_only=False) != c["task_family"].to_numpy(zero_copy_only=False)
    return (c.verdicts == MALFORMED) | differs


def misrouted(c: TaskColumns) -> Mask:
    """Tasks of another shard."""
    return c.shards != c.shard


def unknown(c: TaskColumns) -> Mask:
    """Tasks of a family or an index that the settings do not have, where they list families at all."""
    return c.verdicts == UNKNOWN


def held_out(c: TaskColumns) -> Mask:
    """Tasks that are kept for evaluation, whoever sampled them: training on them would spoil it.

    Evaluations of them do not come this way, and what was imported was made elsewhere.
    """
    return (c.verdicts == HELD_OUT) & ~is_one_of(c["origin"], [Origin.IMPORT])


def _sizes(families: Sequence[Family]) -> tuple[tuple[str, int, int], ...]:
    return tuple((f.name, f.num_train, f.num_tasks) for f in families)


@lru_cache(65536)
def _verdict(task: str, families: tuple[tuple[str, int, int], ...]) -> int:
    family, _, index = task.partition("/")
    well_formed = (
        0 < len(family) <= MAX_FAMILY_LENGTH
        and family.isascii()
        and family.replace(".", "").replace("_", "").replace("-", "").isalnum()
        and index.isascii()
        and index.isdigit()
        and len(index) <= MAX_INDEX_DIGITS
    )
    if not well_formed:
        return MALFORMED
    if not families:
        return SOUND
    for name, num_train, num_tasks in families:
        if name == family and int(index) < num_tasks:
            return SOUND if int(index) < num_train else HELD_OUT
    return UNKNOWN


@lru_cache(65536)
def _shard(task: str) -> int:
    return shard_of(task)
