"""The lake appends each row once, under the declared types, and says loudly when it cannot."""

import json
import math
from datetime import timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.lake import Lake
from infra.tables import prepare
from schemas.errors import LakeError
from schemas.tables import TABLES
from tests.rows import AT, row


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"))
    lake.ensure()
    return lake


def groups(*versions: int) -> list[dict]:
    return [row("groups", group_id=f"g{v}", at_version=v) for v in versions]


def ids(lake: Lake, name: str = "groups", column: str = "group_id") -> list[str]:
    rows = DeltaTable(lake.table_uri(name)).to_pyarrow_table(columns=[column])
    return sorted(rows[column].to_pylist())


def test_a_commit_whose_reply_was_lost_is_not_repeated(lake: Lake):
    adds = lake.stage("groups", pa.Table.from_pylist(groups(1, 2, 3, 4, 5), TABLES["groups"].delta_schema))
    assert lake.commit("groups", adds, "exp-0", 7) == 1
    assert lake.commit("groups", adds, "exp-0", 7) is None
    assert Lake(lake.uri).commit("groups", adds, "exp-0", 7) is None
    assert len(ids(lake)) == 5


def test_an_older_sequence_is_recognized_as_old(lake: Lake):
    lake.append("groups", groups(1), "exp-0", 7)
    assert lake.append("groups", groups(2), "exp-0", 6) is None
    assert lake.append("groups", groups(3), "exp-1", 6) == 2
    assert ids(lake) == ["g1", "g3"]
    assert (lake.last_sequence("groups", "exp-0"), lake.last_sequence("groups", "exp-1")) == (7, 6)
    assert lake.last_sequence("groups", "never") == 0


def test_application_ids_are_found_by_prefix_before_and_after_a_checkpoint(lake: Lake):
    lake.append("groups", groups(1), "curate/a", 1)
    DeltaTable(lake.table_uri("groups")).create_checkpoint()
    lake.append("groups", groups(2), "curate/b", 1)
    lake.append("groups", groups(3), "learner", 1)
    assert lake.app_ids("groups", "curate/") == ["curate/a", "curate/b"]
    assert lake.app_ids("ledger", "") == []


def test_an_append_survives_a_concurrent_delete_and_compaction(lake: Lake):
    lake.append("groups", groups(1, 2), "a", 1)
    other = DeltaTable(lake.table_uri("groups"))
    other.delete("group_id = 'g1'")
    assert lake.append("groups", groups(3), "a", 2) == 3
    other.update_incremental()
    other.optimize.compact()
    assert lake.append("groups", groups(4), "a", 3) == 5
    assert ids(lake) == ["g2", "g3", "g4"]


def test_a_column_added_by_another_process_does_not_stop_appends(lake: Lake):
    lake.append("groups", groups(1), "a", 1)
    adds = lake.stage("groups", pa.Table.from_pylist(groups(2), TABLES["groups"].delta_schema))
    other = pa.table({"group_id": ["x"], "extra": [1]})
    write_deltalake(lake.table_uri("groups"), other, mode="append", schema_mode="merge")
    assert lake.commit("groups", adds, "a", 2) == 3
    assert ids(lake) == ["g1", "g2", "x"]


def test_a_staged_file_that_a_vacuum_removed_is_refused_by_name(lake: Lake):
    adds = lake.stage("groups", pa.Table.from_pylist(groups(1), TABLES["groups"].delta_schema))
    DeltaTable(lake.table_uri("groups")).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    with pytest.raises(LakeError, match=r"removed or altered before its commit.*stage the rows again"):
        lake.commit("groups", adds, "a", 1)
    lake.append("groups", groups(1), "a", 1)
    assert ids(lake) == ["g1"]


def test_a_column_that_is_null_in_every_row_keeps_its_declared_type(lake: Lake):
    nulls = {"error": None, "error_kind": None, "parent_id": None}
    rows = [row("experience", trajectory_id=f"t{i}", **nulls) for i in range(4)]
    untyped = pa.Table.from_pylist(rows)
    assert untyped.schema.field("error").type == pa.null()
    before = lake.table("experience").schema()
    assert lake.append("experience", untyped, "a", 1) == 1
    assert lake.append("experience", [r | {"trajectory_id": "u"} for r in rows], "a", 2) == 2
    assert DeltaTable(lake.table_uri("experience")).schema() == before
    assert len(ids(lake, "experience", "trajectory_id")) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surplus": 1}, "unknown columns \\['surplus'\\]"),
        ({"group_id": None}, "1 nulls in group_id"),
        ({"group_size": "many"}, "do not fit its schema"),
        ({"group_size": 2**40}, "do not fit its schema"),
    ],
)
def test_rows_that_break_the_contract_are_refused(lake: Lake, change: dict, message: str):
    with pytest.raises(LakeError, match=message):
        lake.append("groups", [row("groups") | change], "a", 1)
    assert lake.version("groups") == 0


def test_a_missing_column_that_may_not_be_null_is_refused(lake: Lake):
    with pytest.raises(LakeError, match="nulls in task_id"):
        lake.append("groups", [{"group_id": "g"}], "a", 1)


def test_rows_are_split_by_partition_and_come_back_whole(lake: Lake):
    rows = [row("experience", trajectory_id=f"t{i}", version_bucket=i % 3, token_ids=[i]) for i in range(7)]
    adds = lake.stage("experience", pa.Table.from_pylist(rows, TABLES["experience"].delta_schema))
    assert sorted(a["partition_values"]["version_bucket"] for a in adds) == ["0", "1", "2"]
    assert all(not Path(a["path"]).name.startswith(("_", ".")) for a in adds)
    json.dumps(adds)
    lake.commit("experience", adds, "a", 1)
    found = DeltaTable(lake.table_uri("experience")).to_pyarrow_table().sort_by("trajectory_id").to_pylist()
    assert [(r["trajectory_id"], r["version_bucket"], r["token_ids"]) for r in found] == [
        (f"t{i}", i % 3, [i]) for i in range(7)
    ]


def test_nothing_to_append_commits_nothing(lake: Lake):
    assert lake.append("groups", [], "a", 1) is None
    assert lake.version("groups") == 0


VALUES = st.fixed_dictionaries(
    {
        "group_id": st.text(max_size=40),
        "group_size": st.integers(-(2**31), 2**31 - 1),
        "at_version": st.integers(-(2**63), 2**63 - 1),
        "reward_mean": st.none() | st.floats(),
        "zero_variance": st.booleans(),
        "closed_at": st.integers(0, 10**9).map(lambda us: AT + timedelta(microseconds=us)),
    }
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(VALUES, min_size=1, max_size=4))
def test_filters_on_any_column_find_their_rows(tmp_path: Path, rows: list[dict]):
    """Incomplete or invalid statistics would make the reader drop files silently."""
    lake = Lake(str(tmp_path / str(len(list(tmp_path.iterdir())))))
    prepare(TABLES["groups"], lake.table_uri("groups"), {})
    lake.append("groups", [row("groups", **r) for r in rows], "a", 1)
    dataset = DeltaTable(lake.table_uri("groups")).to_pyarrow_dataset()
    for name, value in rows[0].items():
        if value is None or (isinstance(value, float) and math.isnan(value)):  # they equal nothing
            continue
        expected = sum(r[name] == value for r in rows)
        assert dataset.count_rows(pc.field(name) == value) == expected, name
        query = f'SELECT count(*) FROM dataset WHERE "{name}" = $value'
        assert duckdb.sql(query, params={"value": value}).fetchall() == [(expected,)], name


def test_statistics_stay_right_after_compaction_by_another_writer(lake: Lake):
    for i in range(3):
        lake.append("groups", [row("groups", group_id=f"g{i}", at_version=i, reward_mean=float("nan"))], "a", i + 1)
    table = DeltaTable(lake.table_uri("groups"))
    table.optimize.compact()
    dataset = table.to_pyarrow_dataset()
    assert len(table.file_uris()) == 1
    assert dataset.count_rows(pc.field("at_version") >= 1) == 2
    assert dataset.count_rows(pc.field("closed_by") == "") == 3
    assert dataset.count_rows(pc.field("group_id") == "g1") == 1


def test_a_table_that_promises_no_statistics_gets_row_counts_only(tmp_path: Path):
    lake = Lake(str(tmp_path))
    DeltaTable.create(lake.table_uri("groups"), TABLES["groups"].delta_schema)
    lake.append("groups", groups(1), "a", 1)
    add = next(a["add"] for a in lake.log("groups").commit(1) or [] if "add" in a)
    assert json.loads(add["stats"]) == {"numRecords": 1}


def test_ensure_is_idempotent_and_keeps_to_the_plain_protocol(lake: Lake):
    lake.ensure()
    for table in TABLES.values():
        handle = lake.table(table.name)
        assert handle.version() == 0
        assert (handle.protocol().min_reader_version, handle.protocol().min_writer_version) == (1, 2)
        assert tuple(handle.metadata().partition_columns) == table.partition_by


def test_ensure_adds_the_columns_that_an_older_table_lacks(tmp_path: Path):
    schema = TABLES["groups"].delta_schema
    older = pa.schema([f for f in schema if f.name not in {"closed_by", "num_distinct"}])
    lake = Lake(str(tmp_path))
    DeltaTable.create(lake.table_uri("groups"), older)
    old_row = {k: v for k, v in row("groups", group_id="old").items() if k in older.names}
    write_deltalake(lake.table_uri("groups"), pa.Table.from_pylist([old_row], older), mode="append")
    lake.ensure()
    lake.append("groups", [row("groups", group_id="new", closed_by="timeout")], "a", 1)
    found = DeltaTable(lake.table_uri("groups")).to_pyarrow_table().sort_by("group_id").to_pylist()
    assert [(r["group_id"], r["closed_by"]) for r in found] == [("new", "timeout"), ("old", None)]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (pa.schema([("group_id", pa.string()), ("from_the_future", pa.int64())]), "from_the_future.*upgrade"),
        (pa.schema([("group_id", pa.int64())]), "column group_id: type int64, expected string"),
    ],
)
def test_a_newer_table_is_refused_by_name(tmp_path: Path, schema: pa.Schema, message: str):
    lake = Lake(str(tmp_path))
    DeltaTable.create(lake.table_uri("groups"), schema)
    with pytest.raises(LakeError, match=message):
        lake.ensure()


def test_a_table_with_a_higher_protocol_is_refused(tmp_path: Path):
    lake = Lake(str(tmp_path))
    configuration = {"delta.enableChangeDataFeed": "true"}
    DeltaTable.create(lake.table_uri("groups"), TABLES["groups"].delta_schema, configuration=configuration)
    with pytest.raises(LakeError, match=r"protocol \(1, 4\)"):
        lake.ensure()


def test_unsafe_renames_are_refused_because_they_lose_commits():
    with pytest.raises(LakeError, match="ALLOW_UNSAFE_RENAME"):
        Lake("s3://bucket/lake", {"AWS_S3_ALLOW_UNSAFE_RENAME": "true"})
