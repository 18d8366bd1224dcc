"""A chunk: what one shard got at once, as one record batch, with the messages and notes in their order."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from schemas.messages import Directive, WeightSummary


@dataclass(frozen=True, slots=True)
class Pack:
    """One `trajectories` message: rows [start, stop) of the chunk. `batch` holds the same rows by themselves."""

    start: int
    stop: int
    at_ms: int
    partition: int
    offset: int
    redelivered: bool
    batch: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Note:
    """A `weights` or `control` message."""

    at_ms: int
    message: WeightSummary | Directive


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one shard got at once.

    `rows` are the trajectories of all packs; `faults[i]` is 0, or 1 + the index of the first rule of
    `validate.RULES` that row i breaks. `events` are packs and notes in the order of the log.
    """

    shard: int
    rows: pa.RecordBatch
    events: tuple[Pack | Note, ...]
    dead_letters: tuple[pa.RecordBatch, ...] = ()
    faults: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
