"""Several processes on one lake: it is created once, and no row is lost or doubled."""

import multiprocessing
from collections import Counter
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import pytest
from deltalake import DeltaTable, Field
from deltalake.exceptions import CommitFailedError
from deltalake.schema import PrimitiveType

from infra.lake import Fence, Lake
from infra.staging import conform
from schemas.tables import TABLES
from tests.rows import row

LIMIT_S = 120
METADATA = ("properties", "columns")


def _ensure_and_append(uri: str, number: int, together: Barrier) -> None:
    lake = Lake(uri)
    together.wait(LIMIT_S)
    lake.ensure()
    for sequence in range(1, 6):
        rows = [row("groups", group_id=f"g{number}-{sequence}")]
        lake.append("groups", rows, f"writer-{number}", sequence)


@pytest.mark.slow
def test_processes_that_start_together_create_one_lake_and_lose_no_row(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(3)
    writers = [context.Process(target=_ensure_and_append, args=(str(tmp_path), n, together)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    lake = Lake(str(tmp_path))
    found = DeltaTable(lake.table_uri("groups")).to_pyarrow_table(columns=["group_id"])["group_id"].to_pylist()
    assert sorted(found) == [f"g{n}-{s}" for n in range(3) for s in range(1, 6)]
    assert lake.app_ids("groups", "writer-") == [f"writer-{n}" for n in range(3)]


def _commit_behind_a_fence(uri: str, number: int, begun: Event) -> None:
    lake = Lake(uri)
    assert begun.wait(LIMIT_S)
    for sequence in range(1, 21):
        rows = [row("groups", group_id=f"g{number}-{sequence}"), row("groups", group_id="to be deleted")]
        adds = lake.stage("groups", conform(TABLES["groups"], rows))
        lake.commit("groups", adds, f"writer-{number}", sequence, Fence(f"fence/writer-{number}", 0))


def _disturb(uri: str, begun: Event, over: Event) -> None:
    """Compact, delete, and change the metadata, again and again; what conflicts with a writer is left out.

    A writer's commit must fit between two changes of the metadata, so each of these waits for a commit since the last.
    """
    table, done = DeltaTable(f"{uri}/groups"), Counter[str]()
    acts = {
        "compact": lambda n: table.optimize.compact(),
        "delete": lambda n: table.delete("group_id = 'to be deleted'"),
        "properties": lambda n: table.alter.set_table_properties(
            {"delta.logRetentionDuration": f"interval {n + 30} days"}
        ),
        "columns": lambda n: table.alter.add_columns([Field(f"extra_{n}", PrimitiveType("string"))]),
    }
    number = known = 0
    begun.set()
    while not over.is_set() or len(done) < len(acts):
        for name, act in acts.items():
            if name in METADATA:
                known = _wait_for_commit(table, known, over)
            number += 1
            table.update_incremental()
            try:
                act(number)
                done[name] += 1
            except CommitFailedError:
                continue


def _wait_for_commit(table: DeltaTable, known: int, over: Event) -> int:
    """How many commits the writers have made, once these are more than `known` or all is over."""
    while True:
        table.update_incremental()
        found = sum(table.transaction_version(f"writer-{n}") or 0 for n in range(2))
        if found > known or over.wait(0.01):
            return found


@pytest.mark.slow
def test_commits_get_through_beside_compaction_deletes_and_changes_of_the_schema(tmp_path: Path):
    Lake(str(tmp_path)).ensure()
    context = multiprocessing.get_context("spawn")
    begun, over = context.Event(), context.Event()
    writers = [context.Process(target=_commit_behind_a_fence, args=(str(tmp_path), n, begun)) for n in range(2)]
    other = context.Process(target=_disturb, args=(str(tmp_path), begun, over))
    for process in (other, *writers):
        process.start()
    for writer in writers:
        writer.join()
    over.set()
    other.join(LIMIT_S)
    assert [process.exitcode for process in (*writers, other)] == [0, 0, 0]
    table = DeltaTable(f"{tmp_path}/groups")
    found = Counter(table.to_pyarrow_table(columns=["group_id"])["group_id"].to_pylist())
    del found["to be deleted"]
    assert found == {f"g{n}-{s}": 1 for n in range(2) for s in range(1, 21)}
