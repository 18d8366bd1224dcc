"""Several processes on one lake: it is created once, and no row is lost or doubled."""

import multiprocessing
from pathlib import Path

import pytest
from deltalake import DeltaTable

from infra.lake import Lake
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
