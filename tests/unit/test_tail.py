"""The tail delivers the rows of every data-changing commit, in order, each once."""

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from infra import retries
from infra.lake import Lake
from infra.tables import prepare
from infra.tail import Tail
from schemas.errors import LakeError
from schemas.tables import TABLES
from tests.flaky_store import FlakyStore
from tests.rows import row


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"))
    prepare(TABLES["experience"], lake.table_uri("experience"), {})
    return lake


def append(lake: Lake, sequence: int, *names: str) -> int | None:
    rows = [row("experience", trajectory_id=n, version_bucket=i % 2, token_ids=[i]) for i, n in enumerate(names)]
    return lake.append("experience", rows, "writer", sequence)


def delivered(polled: list[tuple[int, pa.Table]]) -> list[tuple[int, list[str]]]:
    return [(version, sorted(rows["trajectory_id"].to_pylist())) for version, rows in polled]


def table(lake: Lake) -> DeltaTable:
    return DeltaTable(lake.table_uri("experience"))


def test_each_row_is_delivered_once_and_in_order(lake: Lake):
    tail = Tail(lake, "experience")
    assert tail.poll() == []
    append(lake, 1, "a", "b", "c")
    append(lake, 2, "d")
    assert delivered(tail.poll()) == [(1, ["a", "b", "c"]), (2, ["d"])]
    assert tail.version == 2
    assert tail.poll() == []
    append(lake, 3, "e")
    assert delivered(tail.poll()) == [(3, ["e"])]


def test_a_restored_cursor_goes_on_where_it_was(lake: Lake):
    for sequence, name in enumerate("abc", start=1):
        append(lake, sequence, name)
    tail = Tail(lake, "experience")
    assert delivered(tail.poll(max_versions=2)) == [(1, ["a"]), (2, ["b"])]
    assert delivered(Tail(lake, "experience", after_version=tail.version).poll()) == [(3, ["c"])]


def test_all_columns_come_back_under_the_declared_schema(lake: Lake):
    append(lake, 1, "a", "b")
    [(_, rows)] = Tail(lake, "experience").poll()
    assert rows.schema == TABLES["experience"].delta_schema
    found = {r["trajectory_id"]: (r["version_bucket"], r["token_ids"], r["error"]) for r in rows.to_pylist()}
    assert found == {"a": (0, [0], None), "b": (1, [1], None)}


def test_only_the_columns_asked_for_are_read(lake: Lake):
    append(lake, 1, "a")
    [(_, rows)] = Tail(lake, "experience", columns=["version_bucket", "trajectory_id"]).poll()
    assert rows.to_pylist() == [{"version_bucket": 0, "trajectory_id": "a"}]


def test_partition_columns_alone_have_as_many_rows_as_the_files(lake: Lake):
    append(lake, 1, "a", "b", "c")
    [(_, rows)] = Tail(lake, "experience", columns=["version_bucket"]).poll()
    assert sorted(rows["version_bucket"].to_pylist()) == [0, 0, 1]


def test_repeated_compaction_after_a_checkpoint_delivers_nothing(lake: Lake):
    for sequence in range(1, 5):
        append(lake, sequence, f"x{sequence}", f"y{sequence}")
    tail = Tail(lake, "experience")
    assert sum(rows.num_rows for _, rows in tail.poll()) == 8
    table(lake).create_checkpoint()
    for _ in range(2):
        table(lake).optimize.compact()
        assert tail.poll() == []
    assert tail.version == table(lake).version()
    assert table(lake).to_pyarrow_table().num_rows == 8


def test_a_delete_delivers_nothing_and_appends_after_it_do(lake: Lake):
    append(lake, 1, "a", "c", "b")
    tail = Tail(lake, "experience")
    tail.poll()
    table(lake).delete("trajectory_id = 'a'")
    append(lake, 2, "d")
    assert delivered(tail.poll()) == [(3, ["d"])]


def test_a_vanished_commit_stops_the_cursor_before_it(lake: Lake):
    for sequence in range(1, 5):
        append(lake, sequence, f"x{sequence}")
    hidden = Path(lake.table_uri("experience"), "_delta_log", f"{3:020d}.json")
    hidden.rename(hidden.with_suffix(".hidden"))
    tail = Tail(lake, "experience")
    assert delivered(tail.poll()) == [(1, ["x1"]), (2, ["x2"])]
    with pytest.raises(LakeError, match="commit 3 is missing though later ones exist"):
        tail.poll()
    assert tail.version == 2
    hidden.with_suffix(".hidden").rename(hidden)
    assert delivered(tail.poll()) == [(3, ["x3"]), (4, ["x4"])]


def test_a_store_that_refuses_each_request_once_stops_no_poll(lake: Lake):
    append(lake, 1, "a")
    lake._stores["experience"] = FlakyStore(lake.store("experience"))  # type: ignore[assignment]
    tail = Tail(lake, "experience")
    assert delivered(tail.poll()) == [(1, ["a"])]
    assert tail.poll() == []


def test_a_snapshot_that_cannot_be_read_is_an_error_of_the_lake(lake: Lake, monkeypatch: pytest.MonkeyPatch):
    append(lake, 1, "a")
    clean_log(lake, before=1)
    [file] = map(Path, table(lake).file_uris())
    aside = file.rename(file.with_suffix(".aside"))
    monkeypatch.setattr(retries, "ATTEMPTS", 2)
    tail = Tail(lake, "experience", columns=["trajectory_id"])
    with pytest.raises(LakeError, match="experience: reading its snapshot failed 2 times"):
        tail.poll()
    aside.rename(file)
    assert delivered(tail.poll()) == [(1, ["a"])]


def test_a_removed_data_file_stops_the_cursor_before_its_commit(lake: Lake):
    append(lake, 1, "a")
    append(lake, 2, "b")
    tail = Tail(lake, "experience", after_version=1)
    for path in table(lake).file_uris(file_pruning_predicate="trajectory_id = 'b'"):
        Path(path).unlink()
    with pytest.raises(LakeError, match="was removed before it was read"):
        tail.poll()
    assert tail.version == 1


def clean_log(lake: Lake, before: int) -> None:
    table(lake).create_checkpoint()
    for version in range(before):
        Path(lake.table_uri("experience"), "_delta_log", f"{version:020d}.json").unlink()


def test_a_new_reader_of_a_cleaned_log_begins_with_the_snapshot(lake: Lake):
    for sequence in range(1, 4):
        append(lake, sequence, f"x{sequence}")
    clean_log(lake, before=3)
    tail = Tail(lake, "experience", columns=["trajectory_id"])
    assert delivered(tail.poll()) == [(3, ["x1", "x2", "x3"])]
    append(lake, 4, "x4")
    assert delivered(tail.poll()) == [(4, ["x4"])]


def test_an_old_cursor_on_a_cleaned_log_is_an_error_not_a_jump(lake: Lake):
    for sequence in range(1, 5):
        append(lake, sequence, f"x{sequence}")
    clean_log(lake, before=4)
    tail = Tail(lake, "experience", after_version=1)
    with pytest.raises(LakeError, match="commit 2 is missing"):
        tail.poll()
    assert tail.version == 1


def test_rows_written_before_a_column_existed_have_nulls_in_it(tmp_path: Path):
    lake = Lake(str(tmp_path))
    schema = TABLES["groups"].delta_schema
    older = pa.schema([f for f in schema if f.name != "closed_by"])
    DeltaTable.create(lake.table_uri("groups"), older)
    old = {k: v for k, v in row("groups", group_id="g").items() if k != "closed_by"}
    write_deltalake(lake.table_uri("groups"), pa.Table.from_pylist([old], older), mode="append")
    prepare(TABLES["groups"], lake.table_uri("groups"), {})
    [(_, rows)] = Tail(lake, "groups", columns=["group_id", "closed_by"]).poll()
    assert rows.to_pylist() == [{"group_id": "g", "closed_by": None}]
