"""Several processes on one lake: it is created once, and no row is lost or doubled."""

import multiprocessing
from collections import Counter
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from deltalake import DeltaTable, Field
from deltalake.exceptions import CommitFailedError
from deltalake.schema import PrimitiveType

from infra.lake import Fence, Lake
from infra.staging import conform
from schemas.tables import TABLES
from tests.rows import row


def _ensure_and_append(uri: str, number: int) -> None:
    lake = Lake(uri)
    lake.ensure()
    for sequence in range(1, 6):
        rows = [row("groups", group_id=f"g{number}-{sequence}")]
        lake.append("groups", rows, f"writer-{number}", sequence)


@pytest.mark.slow
def test_processes_that_start_together_create_one_lake_and_lose_no_row(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_ensure_and_append, args=(str(tmp_path), n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    lake = Lake(str(tmp_path))
    found = DeltaTable(lake.table_uri("groups")).to_pyarrow_table(columns=["group_id"])["group_id"].to_pylist()
    assert sorted(found) == [f"g{n}-{s}" for n in range(3) for s in range(1, 6)]
    assert lake.app_ids("groups", "writer-") == [f"writer-{n}" for n in range(3)]


def _commit_behind_a_fence(uri: str, number: int) -> None:
    lake = Lake(uri)
    for sequence in range(1, 21):
        rows = [row("groups", group_id=f"g{number}-{sequence}"), row("groups", group_id="to be deleted")]
        adds = lake.stage("groups", conform(TABLES["groups"], rows))
        lake.commit("groups", adds, f"writer-{number}", sequence, Fence(f"fence/writer-{number}", 0))


def _disturb(uri: str, over: Event) -> None:
    """Compact, delete, and change the metadata, again and again; what conflicts with a writer is left out.

    A writer's commit must fit between two changes of the metadata, so there is a moment between two acts.
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
    number = 0
    while not over.is_set() or len(done) < len(acts):
        for name, act in acts.items():
            over.wait(0.1)
            number += 1
            table.update_incremental()
            try:
                act(number)
                done[name] += 1
            except CommitFailedError:
                continue


@pytest.mark.slow
def test_commits_get_through_beside_compaction_deletes_and_changes_of_the_schema(tmp_path: Path):
    Lake(str(tmp_path)).ensure()
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    writers = [context.Process(target=_commit_behind_a_fence, args=(str(tmp_path), n)) for n in range(2)]
    other = context.Process(target=_disturb, args=(str(tmp_path), over))
    for process in (other, *writers):
        process.start()
    for writer in writers:
        writer.join()
    over.set()
    other.join(60)
    assert [process.exitcode for process in (*writers, other)] == [0, 0, 0]
    table = DeltaTable(f"{tmp_path}/groups")
    found = Counter(table.to_pyarrow_table(columns=["group_id"])["group_id"].to_pylist())
    del found["to be deleted"]
    assert found == {f"g{n}-{s}": 1 for n in range(2) for s in range(1, 21)}
