"""The curate flow, on lists in place of Kafka and lake: outcomes, recovery, workers."""

import itertools
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import TestingSource, cluster_main, run_main

from flows import curate
from flows.connectors.items import Raw, Tick
from flows.steps.difficulty import Posterior
from flows.steps.state import State
from schemas.ids import shard_of, task_id
from schemas.names import OUTCOMES
from schemas.settings import Settings
from schemas.topics import TRAJECTORIES
from tests.flows.sinks import Lists
from tests.samples import broken, clock, group, message, weights

SETTINGS = Settings.model_validate(
    {
        "kafka": {"partitions": 1},
        "loop": {"group_size": 4, "batch_size": 4, "max_staleness": 3},
        "curate": {"group_timeout_s": 5},
    }
)
TASKS = [task_id("add", i) for i in range(40)]


class Log:
    """Payloads by offset, from the script itself."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.bodies = {(i.partition, i.offset): i.value for i in items if isinstance(i, Raw) and _is_data(i)}
        self.reads = 0

    def read(self, partition: int, offset: int) -> bytes | None:
        self.reads += 1
        return self.bodies.get((partition, offset))


def _is_data(raw: Raw) -> bool:
    return raw.topic == TRAJECTORIES.name


def script() -> list[Raw]:
    """Groups of many tasks, whole and in pieces, with weights and clock messages between them."""
    offsets, items = itertools.count(), [weights(1, 0)]
    for i, task in enumerate(TASKS):
        members = group(
            i, [0.0, 1.0, None, 1.0] if i % 3 else [1.0] * 4, task_id=task, task_family="add", version=1 + i // 15
        )
        cut = i % 4 + 1  # whole groups, and pieces of 1 to 3 of which some never get the rest
        items.append(message(members[:cut], next(offsets), i))
        if cut < 4 and i % 5:
            items.append(message(members[cut:], next(offsets), i + 0.5))
        if i % 15 == 14:
            items += [weights(1 + i // 15, i, i + 0.7), clock(i, i + 0.8)]
    return [*items, broken(next(offsets), 50), clock(100, 60)]


def flow(items: Sequence[Any], lists: Lists, batch_size: int = 7) -> tuple[Dataflow, Log]:
    log = Log(items)
    source = TestingSource(items, batch_size)
    return curate.build(source, lists.sink, lists.messages, log, SETTINGS), log


def decisions(lists: Lists) -> dict[str, list[dict[str, Any]]]:
    """Rows of each table, in an order that does not depend on how they were written."""
    return {table: sorted(lists.rows(table), key=repr) for table in curate.TABLES}


def test_every_trajectory_gets_one_outcome_and_the_books_balance() -> None:
    items, lists = script(), Lists()
    run_main(flow(items, lists)[0])
    outcomes = [row for row in lists.rows("ledger") if row["event"] in OUTCOMES]
    num_in = sum(len(group_) for group_ in _groups_in(items))
    assert len(outcomes) == len({row["trajectory_id"] for row in outcomes}) == num_in
    assert sum(row["num_rows"] for row in lists.rows("dead_letters")) == 3
    assert len(lists.rows("experience")) == sum(row["event"] == "admitted" for row in outcomes) > 0
    assert len(lists.rows("groups")) == len(TASKS)
    closed = [c.group_id for _, report in lists.sent for c in report.closed]
    assert len(closed) == len(set(closed)) == len(TASKS)


def test_a_later_life_begins_with_what_the_lake_knows_and_names_its_own_log() -> None:
    items, lists = script(), Lists()
    settings = SETTINGS.model_copy(update={"run": SETTINGS.run.model_copy(update={"life": 2})})
    known = Posterior(alpha=9.0, beta=1.0, weight_version=1, num_groups=8)

    def begin(shard: int) -> State:
        return State(posteriors={task: known for task in TASKS if shard_of(task) == shard})

    run_main(curate.build(TestingSource(items, 7), lists.sink, lists.messages, Log(items), settings, begin))
    for table in ("ledger", "experience", "dead_letters"):
        assert {row["topic"] for row in lists.rows(table)} == {"trajectories@2"}
    assert {row["num_groups"] for row in lists.rows("task_difficulty")} == {9}


def _groups_in(items: Sequence[Raw]) -> list[list[str]]:
    chunks = [curate.decode(shard_of("x"), [i], {}) for i in items if isinstance(i, Raw) and _is_data(i)]
    return [chunk.rows.column("trajectory_id").to_pylist() for chunk in chunks if chunk.events]


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_decisions_do_not_depend_on_batches(batch_size: int) -> None:
    usual, other = Lists(), Lists()
    run_main(flow(script(), usual)[0])
    run_main(flow(script(), other, batch_size)[0])
    assert decisions(other) == decisions(usual)


@pytest.mark.parametrize("workers", [2, 3])
def test_decisions_do_not_depend_on_workers(workers: int) -> None:
    usual, other = Lists(), Lists()
    run_main(flow(script(), usual)[0])
    cluster_main(flow(script(), other)[0], [], 0, worker_count_per_proc=workers)
    assert decisions(other) == decisions(usual)


def test_an_abort_at_any_point_changes_no_decision(tmp_path: Path) -> None:
    usual = Lists()
    run_main(flow(script(), usual)[0])
    reads = 0
    for at in (2, 17, 40, 61):
        items: list[Any] = script()
        items[at:at] = [TestingSource.ABORT()]
        store, lists = tmp_path / str(at), Lists()
        store.mkdir()
        init_db_dir(store, 1)
        dataflow, log = flow(items, lists, batch_size=5)
        recovery = RecoveryConfig(store)
        run_main(dataflow, epoch_interval=timedelta(0), recovery_config=recovery)
        run_main(dataflow, epoch_interval=timedelta(0), recovery_config=recovery)
        assert decisions(lists) == decisions(usual)
        reads += log.reads
    assert reads  # payloads of groups that were open at an abort came from the log again


def test_ticks_reach_no_shard() -> None:
    assert curate.route(Tick(), 4) == []


def test_step_ids_are_for_ever() -> None:
    """A renamed step silently loses its state."""
    dataflow, _ = flow([], Lists())
    assert [s.step_id.removeprefix("curate.") for s in dataflow.substeps if "select" not in s.step_id] == [
        "read",
        "route",
        "decode",
        "validate",
        "curate",
        *[f"write_{table}{part}" for table in curate.TABLES for part in ("_ticks", "_merge", "")],
        "report_keys",
        "report",
    ]


def test_importing_the_module_opens_nothing_and_unknown_attributes_are_errors() -> None:
    with pytest.raises(AttributeError):
        curate.nothing  # noqa: B018
