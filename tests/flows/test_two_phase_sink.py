"""Rows reach the lake exactly once, whatever dies between staging, durability and commit."""

import pickle
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
import pyarrow as pa
import pytest
from bytewax.dataflow import Dataflow
from bytewax.errors import BytewaxRuntimeError
from bytewax.inputs import AbortExecution, FixedPartitionedSource
from bytewax.recovery import RecoveryConfig
from bytewax.testing import run_main

from flows.connectors import delta_sink
from flows.connectors.delta_sink import NEW_INCARNATION, DeltaPart, DeltaSink, lake_output
from flows.connectors.epochs import EpochPart, Never
from flows.connectors.items import Raw, Tick
from flows.run import reason_of, recovery_store
from infra.lake import Lake
from schemas.errors import LakeError, SettingsError
from schemas.tables import TASK_DIFFICULTY

TABLE = TASK_DIFFICULTY.name


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"))
    lake.ensure()
    return lake


def rows(*versions: int) -> pa.RecordBatch:
    row = {"task_id": "a/1", "task_family": "a", "alpha": 1.0, "beta": 1.0, "success_mean": 0.5, "is_hard": False}
    return pa.RecordBatch.from_pylist(
        [row | {"weight_version": v, "num_groups": 1, "at": 0} for v in versions], schema=TASK_DIFFICULTY.schema
    )


def written(lake: Lake) -> list[int]:
    lake.version(TABLE)
    return sorted(lake.table(TABLE).to_pyarrow_table()["weight_version"].to_pylist())


def part(lake: Lake, state: Any = None) -> DeltaPart:
    return DeltaSink(lake, TABLE, "flow", 1).build_part("flow.write", "p000", state)


def saved(state: Any) -> Any:
    """State as it comes back from the recovery store."""
    return pickle.loads(pickle.dumps(state))


def test_rows_become_visible_on_the_tick_after_their_epoch(lake: Lake) -> None:
    sink = part(lake)
    sink.write_batch([Tick(), rows(1, 2)])
    assert written(lake) == []
    sink.snapshot()
    assert written(lake) == []
    sink.write_batch([Tick(), rows(3)])
    assert written(lake) == [1, 2]


def test_an_epoch_that_was_durable_is_finished_by_the_next_life(lake: Lake) -> None:
    sink = part(lake)
    sink.write_batch([rows(1)])
    state = saved(sink.snapshot())
    part(lake, state)
    assert written(lake) == [1]


def test_an_epoch_that_was_not_durable_is_as_if_it_had_never_been(lake: Lake) -> None:
    sink = part(lake)
    sink.write_batch([rows(1)])
    durable = saved(sink.snapshot())
    sink.write_batch([Tick(), rows(2, 3)])
    sink.snapshot()  # lost in the crash
    again = part(lake, durable)
    again.write_batch([rows(2)])  # replayed, with another cut
    state = saved(again.snapshot())
    again.write_batch([Tick(), rows(3)])
    assert written(lake) == [1, 2]
    assert state["sequence"] == 2


def test_a_commit_whose_reply_was_lost_is_not_repeated(lake: Lake) -> None:
    sink = part(lake)
    sink.write_batch([rows(1)])
    state = saved(sink.snapshot())
    sink.write_batch([Tick()])  # committed; the process dies before its state says so
    for _ in range(2):
        part(lake, state)
    assert written(lake) == [1]


def test_epochs_without_rows_commit_nothing(lake: Lake) -> None:
    before, sink = lake.version(TABLE), part(lake)
    for _ in range(3):
        sink.write_batch([Tick()])
        sink.snapshot()
    assert lake.version(TABLE) == before


def test_a_large_epoch_is_staged_in_pieces_and_committed_as_one(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_sink, "MAX_BUFFER_BYTES", 10)
    before, sink = lake.version(TABLE), part(lake)
    sink.write_batch([rows(1)])
    sink.write_batch([rows(2)])
    sink.write_batch([Tick()])  # a second source partition's tick must not commit an open epoch
    assert written(lake) == []
    sink.snapshot()
    sink.write_batch([Tick()])
    assert written(lake) == [1, 2]
    assert lake.version(TABLE) == before + 1


def test_a_lost_recovery_store_is_refused_until_an_operator_says_so(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = part(lake)
    sink.write_batch([rows(1)])
    sink.snapshot()
    sink.write_batch([Tick()])
    with pytest.raises(LakeError, match=f"{NEW_INCARNATION}=1"):
        part(lake)
    monkeypatch.setenv(NEW_INCARNATION, "1")
    fresh = part(lake)
    fresh.write_batch([rows(2)])
    fresh.snapshot()
    fresh.write_batch([Tick()])
    assert written(lake) == [1, 2]  # its sequence began again at 1, under another incarnation


def test_a_second_flow_or_partition_on_the_table_is_no_lost_store(lake: Lake) -> None:
    sink = part(lake)
    sink.write_batch([rows(1)])
    sink.snapshot()
    sink.write_batch([Tick()])
    DeltaSink(lake, TABLE, "other", 1).build_part("other.write", "p000", None)
    DeltaSink(lake, TABLE, "flow", 2).build_part("flow.write", "p001", None)


def test_keys_keep_their_partition_and_partitions_are_keys(lake: Lake) -> None:
    sink = DeltaSink(lake, TABLE, "flow", 4)
    assert [sink.part_fn(p) for p in sink.list_parts()] == [0, 1, 2, 3]
    assert sink.part_fn("s007") == 0x1B5EA602  # CRC-32 of "s007": for ever


class Numbers(FixedPartitionedSource[Any, Any]):
    """0, 1, ... `count` - 1, `batch` at a time; the process ends before the call number `dies_at`."""

    def __init__(self, count: int, batch: int, dies_at: int = -1) -> None:
        self.count, self.batch, self.calls_left = count, batch, dies_at

    def list_parts(self) -> list[str]:
        return ["numbers"]

    def build_part(self, step_id: str, for_part: str, resume_state: Any) -> EpochPart:
        return NumbersPart(self, resume_state)


class NumbersPart(EpochPart):
    def __init__(self, source: Numbers, state: Any) -> None:
        super().__init__("numbers", 1 << 20, Never())
        self.source, self.next = source, state["next"] if state else 0

    def pull(self, max_items: int, max_bytes: int) -> Sequence[Raw]:
        self.source.calls_left -= 1
        if self.source.calls_left == -1:
            raise AbortExecution
        numbers = range(self.next, min(self.next + self.source.batch, self.source.count))
        self.next = max(self.next, numbers.stop)
        return [Raw("numbers", 0, n, 0, None, (), b"1") for n in numbers]

    def position(self) -> Any:
        return {"next": self.next}

    def at_end(self) -> bool:
        return self.next >= self.source.count


def flow(source: Numbers, lake: Lake, fails_at: int = -1, partitions: int = 2) -> Dataflow:
    def to_rows(item: Any) -> list[tuple[str, pa.RecordBatch]]:
        if isinstance(item, Tick):
            return []
        if item.offset == fails_at:
            raise RuntimeError("a step fails")
        return [(f"k{item.offset}", rows(item.offset))]

    numbers = Dataflow("numbers")
    items = op.input("source", numbers, source)
    lake_output("write", op.flat_map("to_rows", items, to_rows), items, DeltaSink(lake, TABLE, "numbers", partitions))
    return numbers


def run(numbers: Dataflow, tmp_path: Path) -> None:
    recovery = RecoveryConfig(recovery_store(tmp_path / "recovery"), timedelta(0))
    run_main(numbers, epoch_interval=timedelta(0), recovery_config=recovery)


def test_a_bounded_run_leaves_nothing_pending(lake: Lake, tmp_path: Path) -> None:
    run(flow(Numbers(10, 3), lake), tmp_path)
    assert written(lake) == list(range(10))


@pytest.mark.parametrize("dies_at", [0, 1, 2, 3])
def test_a_flow_that_dies_again_and_again_writes_every_row_once(lake: Lake, tmp_path: Path, dies_at: int) -> None:
    for life in range(12):
        run(flow(Numbers(20, 2 + life % 3, dies_at + life % 2), lake), tmp_path)
    run(flow(Numbers(20, 5), lake), tmp_path)
    assert written(lake) == list(range(20))


def test_an_error_commits_nothing_of_its_epoch(lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(BytewaxRuntimeError):
        run(flow(Numbers(6, 6), lake, fails_at=4), tmp_path)
    assert written(lake) == []
    run(flow(Numbers(6, 6), lake), tmp_path)
    assert written(lake) == list(range(6))


def test_sink_partitions_may_grow_and_never_shrink(lake: Lake, tmp_path: Path) -> None:
    run(flow(Numbers(4, 2), lake), tmp_path)
    run(flow(Numbers(8, 2), lake, partitions=4), tmp_path)
    assert written(lake) == list(range(8))
    with pytest.raises(RuntimeError) as raised:
        run(flow(Numbers(12, 2), lake, partitions=1), tmp_path)
    assert isinstance(reason_of(raised.value), SettingsError)
    assert written(lake) == list(range(8))


def test_an_error_of_ours_is_found_inside_those_of_bytewax(lake: Lake, tmp_path: Path) -> None:
    source = Numbers(4, 2)
    source.build_part = lambda *_: (_ for _ in ()).throw(LakeError("gone"))
    with pytest.raises(BytewaxRuntimeError) as raised:
        run(flow(source, lake), tmp_path)
    assert str(reason_of(raised.value)) == "gone"
