"""What a dead execution wrote for epochs that are run again must not come back: Bytewax keeps it."""

import pickle
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import bytewax.operators as op
import pytest
from bytewax.dataflow import Dataflow
from bytewax.inputs import AbortExecution, FixedPartitionedSource, StatefulSourcePartition
from bytewax.recovery import RecoveryConfig
from bytewax.testing import TestingSink, run_main

from flows.recovery import recovery_store, resume_epoch, sweep

ITEMS = ["k", "k", "k", "j", "j", "j", "j", "j", "k", "j"]


class Position(StatefulSourcePartition[str, int]):
    def __init__(self, end: int, position: int) -> None:
        self._end, self._position = end, position

    def next_batch(self) -> list[str]:
        if self._position == self._end:
            raise AbortExecution  # like a kill: no state gets a last snapshot
        self._position += 1
        return [ITEMS[self._position - 1]]

    def snapshot(self) -> int:
        return self._position


class Items(FixedPartitionedSource[str, int]):
    def __init__(self, end: int) -> None:
        self._end = end

    def list_parts(self) -> list[str]:
        return ["all"]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> Position:
        return Position(self._end, resume_state or 0)


def count(store: Path, end: int) -> list[tuple[str, int]]:
    """One execution, up to item `end`: how often each key has been seen, by all executions. Each item is an epoch."""
    seen: list[tuple[str, int]] = []
    flow = Dataflow("count")
    keyed = op.key_on("key", op.input("items", flow, Items(end)), lambda item: item)
    counted = op.stateful_map("count", keyed, lambda state, _: ((state or 0) + 1, (state or 0) + 1))
    op.output("out", counted, TestingSink(seen))
    run_main(flow, epoch_interval=timedelta(0), recovery_config=RecoveryConfig(store))
    return seen


def leave_behind(store: Path, key: str, state: int) -> None:
    """What a worker leaves that was ahead when its cluster died: a snapshot of an epoch that is run again."""
    epoch = resume_epoch(store)
    for path in store.glob("part-*.sqlite3"):
        with closing(sqlite3.connect(path)) as part, part:
            part.execute(
                "INSERT INTO snaps (step_id, state_key, snap_epoch, ser_change) SELECT step_id, state_key, ?, ? "
                "FROM snaps WHERE state_key = ? GROUP BY 1, 2",
                (epoch + 1, pickle.dumps(state), key),  # the one before is written again for every state that is loaded
            )


@pytest.mark.parametrize(("swept", "last"), [(True, ("k", 4)), (False, ("k", 100))])
def test_a_state_is_what_the_epochs_that_count_made_it(tmp_path: Path, swept: bool, last: tuple[str, int]) -> None:
    store = recovery_store(tmp_path / "store")
    assert count(store, 3)[-1] == ("k", 3)
    leave_behind(store, "k", 99)
    if swept:
        assert sweep(store) >= 1  # the epoch in which it ended leaves one, too
    count(store, 8)
    assert last in count(store, 10)  # unswept: what is guarded against, should Bytewax ever mend it


def test_the_epoch_of_resumption_is_bytewaxs_own(tmp_path: Path) -> None:
    store = recovery_store(tmp_path / "store")
    assert resume_epoch(store) == 0
    count(store, 3)
    expected = resume_epoch(store)
    assert expected > 0
    count(store, 5)
    began: dict[int, int] = {}
    for path in store.glob("part-*.sqlite3"):
        with closing(sqlite3.connect(path)) as part:
            began |= dict(part.execute("SELECT ex_num, resume_epoch FROM exs"))
    assert began[max(began)] == expected


def test_a_sweep_leaves_what_counts(tmp_path: Path) -> None:
    store = recovery_store(tmp_path / "store")
    count(store, 3)
    sweep(store)
    assert sweep(store) == 0
    assert count(store, 9)[-1] == ("k", 4)
