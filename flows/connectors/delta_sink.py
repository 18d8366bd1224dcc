"""Exactly once into Delta: stage in `snapshot()`, commit on the next epoch's tick, finish after a restart.

A tick of epoch E+1 proves that epoch E, and with it the list of staged files, is durable on every worker; so does a
restart from that state. Before that proof nothing is committed, after it the commit can be repeated at will: its
sequence makes it idempotent. `close()` never commits, for it also runs while an error unwinds.

Two lives at once (the first was stopped past its lease, a second took over, the first wakes up) are kept apart by the
fence of `infra.lake`. `flows.run` raises it before the recovery state is read, and only then cuts the first off its
recovery store. So, with n the sequence of any epoch of the first life:

- It committed n before the fence rose: n was durable before that, and is in the state that is read afterwards, which
  therefore does not make its rows again; finding n committed, it skips it.
- It staged n, or made n durable, but did not commit it: it never will. The state that is read has n as pending, and
  commits it, or does not know n, and makes its rows again.

A state whose sequence is below the one in the table contradicts the first: it is an older copy, and is refused.
"""

import os
import uuid
import zlib
from collections.abc import Sequence
from typing import Any

import bytewax.operators as op
import pyarrow as pa
from bytewax.dataflow import Stream
from bytewax.operators import KeyedStream
from bytewax.outputs import FixedPartitionedSink, StatefulSinkPartition

from flows.connectors.hold import HOLD
from flows.connectors.items import Tick
from infra.failpoints import hit
from infra.lake import Fence, Lake
from schemas.errors import LakeError

State = dict[str, Any]

NEW_INCARNATION = "LAGOON_NEW_INCARNATION"
"""Environment variable; `1` lets a flow start without its recovery store on a lake that it has written to."""

MAX_BUFFER_BYTES = 64 * 1024 * 1024
"""Rows beyond this are staged before the epoch ends."""


class DeltaSink(FixedPartitionedSink[pa.RecordBatch | Tick, State]):
    """Rows of one lake table, each in it exactly once. Items: (key, RecordBatch), and (part, Tick) to every part.

    A key goes to one partition for ever: keep `partitions` and step ids, for state and order hang on them.
    `state_guard=False` drops the check for a lost recovery store; for flows that run without one.
    """

    def __init__(self, lake: Lake, table: str, flow: str, partitions: int, state_guard: bool = True) -> None:
        self.lake, self.table, self._flow = lake, table, flow
        self._parts = [f"p{i:03d}" for i in range(partitions)]
        self._state_guard = state_guard

    def list_parts(self) -> list[str]:
        """`p000`, `p001`, ...: zero-padded, because Bytewax routes by their sorted order."""
        return list(self._parts)

    def part_fn(self, item_key: str) -> int:
        """The partition that `item_key` names, else a stable hash."""
        return self._parts.index(item_key) if item_key in self._parts else zlib.crc32(item_key.encode())

    def fence(self, part: str) -> str:
        """Application id of the fence of a partition: each its own, so that none waits for another."""
        return f"fence/{self._flow}/{part}"

    def build_part(self, step_id: str, for_part: str, resume_state: State | None) -> "DeltaPart":
        """Resume, and finish what was pending.

        Raises:
            LakeError: there is no state, or an old one, but this flow has committed to the table before.
        """
        prefix = f"{self._flow}/{for_part}/"
        if resume_state is None and self._state_guard:
            self._refuse_lost_state(prefix)
        return DeltaPart(self.lake, self.table, f"{prefix}{step_id}", resume_state, HOLD.fence(self.fence(for_part)))

    def _refuse_lost_state(self, prefix: str) -> None:
        known = self.lake.app_ids(self.table, prefix)
        if known and os.environ.get(NEW_INCARNATION) != "1":
            raise LakeError(
                f"flow {self._flow} has no recovery state for table {self.table}, but the table has its commits "
                f"({known[-1]}): the recovery store was lost, or a step was renamed. Restore the store, or let `lagoon "
                f"resume` begin a new life of the run. To read its topics again instead, set {NEW_INCARNATION}=1 for "
                "one start: the flow then begins with the oldest message, and rows that it had written come again"
            )


class DeltaPart(StatefulSinkPartition[pa.RecordBatch | Tick, State]):
    """One partition. State: incarnation, sequence of the last staged epoch, staged files not known to be committed."""

    def __init__(self, lake: Lake, table: str, name: str, state: State | None, fence: Fence | None) -> None:
        self._lake, self._table, self._fence = lake, table, fence
        state = state or {"incarnation": uuid.uuid4().hex, "sequence": 0, "pending": []}
        self._incarnation: str = state["incarnation"]
        self._app_id = f"{name}/{self._incarnation}"
        self._sequence: int = state["sequence"]
        self._pending: list[tuple[int, list[dict[str, Any]]]] = list(state["pending"])
        self._buffer: list[pa.RecordBatch] = []
        self._buffer_bytes = 0
        self._staged: list[dict[str, Any]] = []
        if self._sequence:
            self._refuse_older_state()
        self._commit()

    def write_batch(self, values: list[pa.RecordBatch | Tick]) -> None:
        """Buffer rows; on a tick, commit what earlier epochs staged."""
        for value in values:
            if isinstance(value, Tick):
                self._commit()
            elif value.num_rows:
                self._buffer.append(value)
                self._buffer_bytes += value.nbytes
        if self._buffer_bytes > MAX_BUFFER_BYTES:
            self._stage()

    def snapshot(self) -> State:
        """Stage the epoch's rows. A copy is returned, for it is pickled later."""
        self._stage()
        if self._staged:
            self._sequence += 1
            self._pending.append((self._sequence, self._staged))
            self._staged = []
            hit("sink.after_stage")
        return {"incarnation": self._incarnation, "sequence": self._sequence, "pending": list(self._pending)}

    def _refuse_older_state(self) -> None:
        last = self._lake.last_sequence(self._table, self._app_id)
        if last > self._sequence:
            raise LakeError(
                f"the recovery state of {self._app_id} ends at sequence {self._sequence}, but table {self._table} has "
                f"sequence {last}: the recovery store is an older copy. Restore the newest one. To go on without it, "
                f"remove it and set {NEW_INCARNATION}=1 for one start: the flow then reads its topics from the oldest "
                "message on, and rows that it had written come again"
            )

    def _stage(self) -> None:
        if self._buffer:
            self._staged += self._lake.stage(self._table, pa.Table.from_batches(self._buffer).combine_chunks())
            self._buffer, self._buffer_bytes = [], 0

    def _commit(self) -> None:
        """Commit the pending epochs in order; those that an earlier life committed are skipped by their sequence."""
        for sequence, adds in self._pending:
            hit("sink.before_commit")
            self._lake.commit(self._table, adds, self._app_id, sequence, self._fence)
            hit("sink.after_commit")
        self._pending = []


def ticks(step_id: str, items: Stream[Any], sink_keys: Sequence[str]) -> KeyedStream[Tick]:
    """The ticks among `items` (a source's stream), one for each of `sink_keys` (a sink's `list_parts()`)."""
    keys = list(sink_keys)

    def fan_out(item: Any) -> list[tuple[str, Tick]]:
        return [(key, item) for key in keys] if isinstance(item, Tick) else []

    return op.flat_map(step_id, items, fan_out)


def lake_output(step_id: str, rows: KeyedStream[pa.RecordBatch], items: Stream[Any], sink: DeltaSink) -> None:
    """Write `rows`, (key, RecordBatch) under the table's schema, through `sink`, driven by the ticks among `items`."""
    driven = op.merge(f"{step_id}_merge", rows, ticks(f"{step_id}_ticks", items, sink.list_parts()))
    op.output(step_id, driven, sink)
