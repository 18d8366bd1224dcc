"""The dispatch flow, on lists in place of Kafka and lake."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import TestingSource, run_main

from flows import dispatch
from flows.connectors.items import Clock, Raw, Tick
from schemas.errors import SettingsError
from schemas.messages import BufferReport, ClosedGroup, Directive, Task
from schemas.settings import Settings
from schemas.topics import BUFFER
from tests.flows.sinks import Lists
from tests.samples import NOON, T0_MS, control, weights

SETTINGS = Settings.model_validate(
    {
        "loop": {"group_size": 4, "batch_size": 8},
        "learner": {"sync_interval_start": 1},
        "dispatch": {"updates_ahead": 1, "lease_s": 6, "max_attempts": 2},
        "curate": {"group_timeout_s": 5},
        "families": [{"name": "add"}],
    }
)


def flow(items: Sequence[Any], lists: Lists, clock: Lists) -> Dataflow:
    source = TestingSource(items)
    return dispatch.build(source, lists.messages, clock.messages, lists.sink("dispatches"), SETTINGS)


def each_epoch(*items: Any) -> list[Any]:
    """Each of `items` in an epoch of its own, which begins with a tick as those of the real source do."""
    return [x for item in items for x in (Tick(), item)] + [Tick()]


def at(second: float) -> Clock:
    return Clock(T0_MS + round(second * 1000))


def closing(*group_ids: str) -> Raw:
    report = BufferReport(
        shard="s000",
        at=NOON,
        learner_version=1,
        trajectories={},
        tokens={},
        live={},
        num_pending=0,
        closed=tuple(ClosedGroup(group_id=g, task_id="add/1", num_members=4, complete=True) for g in group_ids),
    )
    return Raw(BUFFER.name, 0, 0, T0_MS, b"s000", (), report.to_bytes())


def run(items: Sequence[Any], folder: Path) -> tuple[list[tuple[str, Task]], list[Any], list[dict[str, Any]]]:
    """Tasks, clock messages and rows; twice where the source aborts once. Every item ends an epoch."""
    lists, clock = Lists(), Lists()
    folder.mkdir(exist_ok=True)
    init_db_dir(folder, 1)
    dataflow = flow(items, lists, clock)
    for _ in range(2 if any(isinstance(i, TestingSource.ABORT) for i in items) else 1):
        run_main(dataflow, epoch_interval=timedelta(0), recovery_config=RecoveryConfig(folder))
    return lists.sent, clock.sent, lists.rows("dispatches")


def test_tasks_rows_and_clock_messages_come_out(tmp_path: Path) -> None:
    tasks, clock, rows = run(each_epoch(weights(1, 0), at(1), at(2)), tmp_path / "r")
    assert [key for key, _ in tasks] == [task.group_id for _, task in tasks] == [r["group_id"] for r in rows]
    assert [row["event"] for row in rows] == ["opened"] * 2
    assert [key for key, _ in clock] == ["clock"] * 2
    assert all(isinstance(message, Directive) and message.target == "clock" for _, message in clock)


def test_a_closed_group_is_followed_by_another(tmp_path: Path) -> None:
    first = run(each_epoch(weights(1, 0), at(1)), tmp_path / "first")[0]
    closed = closing(*(key for key, _ in first))
    tasks, _, rows = run(each_epoch(weights(1, 0), at(1), closed, at(2), at(4)), tmp_path / "second")
    assert [task for _, task in tasks[:2]] == [task for _, task in first]  # the same draws
    assert [(row["event"], row["attempt"]) for row in rows] == [("opened", 1)] * 4
    assert len({key for key, _ in tasks}) == 4


def test_an_abort_repeats_no_draw_and_leaves_no_task_without_its_row(tmp_path: Path) -> None:
    pause = control(0, 0, target="dispatch", pause=True)
    script = each_epoch(weights(1, 0), at(1), at(4), at(7), pause, at(10), at(13))
    usual = run(script, tmp_path / "usual")
    for position in range(1, len(script)):
        items = [*script[:position], TestingSource.ABORT(), *script[position:]]
        tasks, _, rows = run(items, tmp_path / str(position))
        assert rows == usual[2]
        assert {(key, task.attempt) for key, task in tasks} == {(key, task.attempt) for key, task in usual[0]}
    assert [row["event"] for row in rows] == ["opened"] * 2 + ["reissued"] * 2 + ["abandoned"] * 2


def test_messages_that_nobody_can_read_are_passed_over() -> None:
    assert dispatch.decode(Raw(BUFFER.name, 0, 0, T0_MS, None, (), b"{")) is None


def test_settings_without_a_task_end_the_flow_before_it_starts() -> None:
    with pytest.raises(SettingsError):
        dispatch.build(TestingSource([]), Lists().messages, Lists().messages, Lists().sink("dispatches"), Settings())


def test_step_ids_are_for_ever() -> None:
    """A renamed step silently loses its state."""
    dataflow = flow([], Lists(), Lists())
    assert [s.step_id.removeprefix("dispatch.") for s in dataflow.substeps] == [
        *("read", "decode", "decide", "select_tasks", "send_keys", "send", "select_clock", "tell_keys", "tell"),
        *("select_rows", "write_ticks", "write_merge", "write"),
    ]
