"""Maintenance changes how the lake lies, never what it says, and removes nothing that anybody still needs."""

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from obstore.exceptions import BaseError
from prometheus_client import REGISTRY
from safetensors.numpy import save_file

from infra.claims import Claims
from infra.lake import Lake
from infra.maintain import Upkeep
from infra.maintenance.claims import remove_claims
from infra.maintenance.compaction import compact
from infra.maintenance.logs import checkpoint, clean_log
from infra.maintenance.orphans import vacuum
from infra.maintenance.readers import best_versions, checkpoint_versions, cursors, served_versions
from infra.maintenance.retention import remove_versions, superfluous
from infra.tail import Tail
from infra.weights import MANIFEST, WeightStore, describe, fingerprint_file
from schemas.claims import Claim
from schemas.errors import LagoonError, LakeError, SettingsError, WeightStoreError
from schemas.messages import Manifest
from schemas.settings import Settings, load
from schemas.tables import TABLES
from tests.rows import AT, row
from trainers.checkpoint import Checkpoints, State
from trainers.stream import Cursor

MIB = 2**20
MONTHS_AGO = time.time() - 90 * 86_400


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"))
    lake.ensure()
    return lake


def append(lake: Lake, sequence: int, bucket: int = 0, num_rows: int = 1) -> None:
    rows = [
        row("experience", trajectory_id=f"{sequence}/{i}", version_bucket=bucket, token_ids=[i])
        for i in range(num_rows)
    ]
    lake.append("experience", rows, "writer", sequence)


def squeeze(lake: Lake, min_files: int = 2, after: timedelta = timedelta()) -> int:
    return compact(lake, "experience", min_files, 16 * MIB, datetime.now(UTC) + after, lambda: False)


def table(lake: Lake, name: str = "experience") -> DeltaTable:
    return DeltaTable(lake.table_uri(name))


def log_files(lake: Lake, pattern: str) -> list[int]:
    folder = Path(lake.table_uri("experience"), "_delta_log")
    return sorted(int(path.name[:20]) for path in folder.glob(f"*.{pattern}"))


def age(folder: Path, names: str = "*", at: float = MONTHS_AGO) -> None:
    for path in folder.rglob(names):
        if path.is_file():
            os.utime(path, (at, at))


def test_repeated_compaction_after_a_checkpoint_keeps_the_rows_and_tells_a_tail_nothing(lake: Lake) -> None:
    for sequence in range(1, 5):
        append(lake, sequence, num_rows=1000)
    tail = Tail(lake, "experience", columns=["trajectory_id"])
    assert sum(rows.num_rows for _, rows in tail.poll()) == 4000
    table(lake).create_checkpoint()
    assert squeeze(lake, min_files=3) == 4
    assert squeeze(lake, min_files=0) == 0
    assert tail.poll() == []
    append(lake, 5, num_rows=1000)
    table(lake).create_checkpoint()
    assert squeeze(lake, min_files=1) == 2
    assert [rows.num_rows for _, rows in tail.poll()] == [1000]
    assert tail.version == lake.version("experience")
    found = table(lake).to_pyarrow_table(columns=["trajectory_id"])["trajectory_id"].to_pylist()
    assert sorted(found) == sorted(f"{s}/{i}" for s in range(1, 6) for i in range(1000))


def test_only_partitions_with_too_many_small_files_are_compacted(lake: Lake) -> None:
    for sequence, bucket in enumerate([0, 0, 0, 1, 1, 2], start=1):
        append(lake, sequence, bucket)
    assert squeeze(lake, min_files=2) == 3
    files = pa.table(table(lake).get_add_actions(flatten=True))["partition.version_bucket"].to_pylist()
    assert sorted(files) == [0, 1, 1, 2]


def test_a_partition_that_rests_is_merged_however_few_files_it_has(lake: Lake) -> None:
    for sequence, bucket in enumerate([0, 0, 1], start=1):
        append(lake, sequence, bucket)
    assert squeeze(lake, min_files=32, after=timedelta(minutes=59)) == 0
    assert squeeze(lake, min_files=32, after=timedelta(minutes=61)) == 2
    assert squeeze(lake, min_files=32, after=timedelta(minutes=180)) == 0
    append(lake, 4)  # of one that comes late
    assert squeeze(lake, min_files=32, after=timedelta(minutes=59)) == 0
    assert squeeze(lake, min_files=32, after=timedelta(minutes=61)) == 2
    assert table(lake).to_pyarrow_table().num_rows == 4


def test_a_table_without_partitions_is_compacted_as_one(lake: Lake) -> None:
    for sequence in range(1, 4):
        lake.append("groups", [row("groups", group_id=f"g{sequence}")], "writer", sequence)
    assert compact(lake, "groups", 2, 16 * MIB, datetime.now(UTC), lambda: False) == 3
    assert sorted(table(lake, "groups").to_pyarrow_table()["group_id"].to_pylist()) == ["g1", "g2", "g3"]


def test_a_tail_that_lags_behind_compaction_and_vacuum_still_reads_every_row(lake: Lake) -> None:
    for sequence in range(1, 4):
        append(lake, sequence)
    age(Path(lake.uri), "*.parquet")
    squeeze(lake)
    vacuum(lake, "experience", 168)
    polled = Tail(lake, "experience", columns=["trajectory_id"]).poll()
    assert [rows["trajectory_id"].to_pylist() for _, rows in polled] == [["1/0"], ["2/0"], ["3/0"]]


def test_a_staged_file_survives_a_vacuum_and_is_committed_after_it(lake: Lake) -> None:
    for sequence in range(1, 4):
        append(lake, sequence)
    rows = pa.Table.from_pylist([row("experience", trajectory_id="late")], TABLES["experience"].delta_schema)
    adds = lake.stage("experience", rows)
    age(Path(lake.uri), "*.parquet", time.time() - 167 * 3600)
    assert vacuum(lake, "experience", 168) == 0
    assert lake.commit("experience", adds, "writer", 4) == 4
    squeeze(lake)
    found = table(lake).to_pyarrow_table(columns=["trajectory_id"])["trajectory_id"].to_pylist()
    assert sorted(found) == ["1/0", "2/0", "3/0", "late"]


def test_a_staged_file_beyond_the_retention_fails_loudly_at_its_commit(lake: Lake) -> None:
    rows = pa.Table.from_pylist([row("experience")], TABLES["experience"].delta_schema)
    adds = lake.stage("experience", rows)
    age(Path(lake.uri), "*.parquet")
    assert vacuum(lake, "experience", 168) == adds[0]["size"]
    with pytest.raises(LakeError, match="was removed or altered before its commit"):
        lake.commit("experience", adds, "writer", 1)


def test_a_vacuum_removes_orphans_by_age_and_commits_nothing_where_there_are_none(lake: Lake) -> None:
    append(lake, 1)
    folder = Path(lake.table_uri("experience"))
    for name in ("old.parquet", "old.parquet.tmp", "young.parquet"):
        (folder / name).write_bytes(b"12345")
    age(folder, "old.*")
    assert vacuum(lake, "experience", 168) == 10
    assert sorted(path.name for path in folder.glob("*.parquet*")) == ["young.parquet"]
    version = lake.version("experience")
    assert vacuum(lake, "experience", 168) == 0
    assert lake.version("experience") == version


def long_log(lake: Lake) -> Path:
    """Commits 1 to 6, with checkpoints at 3 and 6, all of them old."""
    for sequence in range(1, 7):
        append(lake, sequence)
        if sequence % 3 == 0:
            table(lake).create_checkpoint()
    folder = Path(lake.table_uri("experience"), "_delta_log")
    age(folder)
    return folder


def test_a_log_is_cleaned_up_to_the_newest_checkpoint(lake: Lake) -> None:
    long_log(lake)
    stale = Lake(lake.uri)
    assert stale.version("experience") == 6
    assert clean_log(lake, "experience", 720, datetime.now(UTC)) > 0
    assert (log_files(lake, "json"), log_files(lake, "checkpoint.parquet")) == ([6], [6])
    append(lake, 7)
    assert table(lake).to_pyarrow_table().num_rows == 7
    assert Tail(lake, "experience", after_version=6).poll()[0][0] == 7
    assert (stale.last_sequence("experience", "writer"), lake.app_ids("experience", "w")) == (7, ["writer"])


@pytest.mark.parametrize(("cursor", "kept"), [(-1, 0), (1, 0), (2, 3), (4, 3), (5, 6), (6, 6)])
def test_no_commit_goes_that_a_reader_has_still_to_read(lake: Lake, cursor: int, kept: int) -> None:
    long_log(lake)
    clean_log(lake, "experience", 720, datetime.now(UTC), cursor)
    assert log_files(lake, "json") == list(range(kept, 7))
    polled = Tail(lake, "experience", after_version=cursor).poll()
    assert [version for version, _ in polled] == list(range(max(cursor, 0) + 1, 7))


def test_no_young_commit_goes(lake: Lake) -> None:
    folder = long_log(lake)
    age(folder, f"{4:020d}.json", time.time())
    clean_log(lake, "experience", 720, datetime.now(UTC))
    assert log_files(lake, "json") == [3, 4, 5, 6]


def test_compaction_and_vacuum_leave_old_commits_to_the_cleaning_of_the_log(lake: Lake) -> None:
    long_log(lake)
    (Path(lake.table_uri("experience")) / "orphan.parquet").write_bytes(b"x")
    age(Path(lake.table_uri("experience")), "orphan.parquet")
    assert squeeze(lake) == 6
    assert vacuum(lake, "experience", 168) == 1
    table(lake).create_checkpoint()
    assert log_files(lake, "json") == list(range(10))


def test_a_table_of_older_code_learns_to_leave_its_log_alone(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    DeltaTable.create(lake.table_uri("groups"), TABLES["groups"].delta_schema)
    lake.ensure()
    assert table(lake, "groups").metadata().configuration["delta.enableExpiredLogCleanup"] == "false"
    assert lake.version("groups") == 1
    lake.ensure()
    assert lake.version("groups") == 1


def test_a_handle_from_before_the_cleaning_goes_on(lake: Lake) -> None:
    stale = Lake(lake.uri)
    assert stale.version("experience") == 0
    long_log(lake)
    clean_log(lake, "experience", 720, datetime.now(UTC))
    assert stale.append("experience", [row("experience", trajectory_id="new")], "writer", 7) == 7
    assert stale.append("experience", [row("experience", trajectory_id="again")], "writer", 7) is None


def test_a_checkpoint_is_written_when_many_commits_have_come_since_the_last(lake: Lake) -> None:
    append(lake, 1)
    append(lake, 2)
    assert not checkpoint(lake, "experience", commits=3)
    append(lake, 3)
    assert checkpoint(lake, "experience", commits=3)
    append(lake, 4)
    assert not checkpoint(lake, "experience", commits=3)
    assert log_files(lake, "checkpoint.parquet") == [3]


VERSIONS = st.sets(st.integers(1, 40))


@given(VERSIONS, st.integers(1, 10), VERSIONS, st.dictionaries(st.integers(1, 40), st.integers(1, 40)))
def test_what_goes_is_neither_new_nor_named_nor_built_on(
    versions: set[int], keep: int, named: set[int], parents: dict[int, int]
) -> None:
    gone = superfluous(versions, keep, named, parents)
    left = versions - set(gone)
    assert gone == sorted(set(gone))
    assert not set(gone) & {*sorted(versions)[-keep:], *named}
    assert not set(gone) & {parents[v] for v in left if v in parents}
    if not parents:
        assert left == versions & {*sorted(versions)[-keep:], *named}


def publish(store: WeightStore, folder: Path, *versions: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for version in versions:
        save_file({"w": np.full(3, version, np.float32)}, folder / "model.safetensors")
        fingerprint = fingerprint_file(folder / "model.safetensors")
        files = describe(folder)
        store.publish(folder, Manifest(version=version, files=files, fingerprint=fingerprint, created_at=AT))


def test_removed_weight_versions_are_gone_for_every_reader_and_the_rest_can_be_fetched(tmp_path: Path) -> None:
    store, reader = WeightStore(str(tmp_path / "store")), WeightStore(str(tmp_path / "store"))
    publish(store, tmp_path / "model", *range(1, 7))
    assert reader.versions() == [1, 2, 3, 4, 5, 6]
    removed, num_bytes = remove_versions(store, keep=2, named={2})
    assert (removed, reader.versions()) == ([1, 3, 4], [2, 5, 6])
    assert num_bytes > 0
    for version in (2, 5, 6):
        reader.fetch(version, tmp_path / "cache")
    with pytest.raises(WeightStoreError, match="never completed"):
        reader.manifest(3)


def test_a_removal_that_was_cut_short_is_finished_and_a_publication_is_left_alone(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "store"))
    publish(store, tmp_path / "model", 1, 2, 3)
    (tmp_path / "store" / "v00000001" / MANIFEST).unlink()
    (tmp_path / "store" / "v00000004").mkdir()
    (tmp_path / "store" / "v00000004" / "model.safetensors").write_bytes(b"half")
    store = WeightStore(store.uri)
    remove_versions(store, keep=2, named=())
    assert (store.versions(), store.incomplete()) == ([2, 3], [4])


def test_an_old_version_that_stays_keeps_no_removal_from_being_finished(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "store"))
    publish(store, tmp_path / "model", 1, 2, 3)
    (tmp_path / "store" / "v00000002" / MANIFEST).unlink()
    remove_versions(store := WeightStore(store.uri), keep=1, named={1})
    assert (store.versions(), store.incomplete()) == ([1, 3], [])


def test_while_the_store_does_not_say_what_a_version_builds_on_none_is_removed(tmp_path: Path) -> None:
    class Away(WeightStore):
        def manifest(self, version: int) -> Manifest:
            if version == 3:
                raise WeightStoreError("the weight store cannot be reached") from BaseError("503")
            return super().manifest(version)

    store = Away(str(tmp_path / "store"))
    publish(store, tmp_path / "model", 1, 2, 3)
    with pytest.raises(WeightStoreError, match="cannot be reached"):
        remove_versions(store, keep=1, named=())
    assert store.versions() == [1, 2, 3]


def test_the_newest_version_cannot_be_removed(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "store"))
    publish(store, tmp_path / "model", 1)
    with pytest.raises(WeightStoreError, match="version 1 is the newest"):
        store.remove(1)


def test_the_best_evals_name_their_versions(lake: Lake) -> None:
    figures = [(3, 0.5, 0.4), (4, 0.9, 0.3), (5, 0.8, 0.6), (6, None, None)]
    rows = [row("evals", end_version=v, score=score, low=low) for v, score, low in figures]
    assert best_versions(lake) == set()
    lake.append("evals", rows, "records", 1)
    assert best_versions(lake) == {4, 5}


def test_an_open_service_names_the_version_of_its_last_report(lake: Lake) -> None:
    def report(instance: str, minute: int, version: int | None) -> dict:
        return row("usage", instance=instance, ended_at=AT + timedelta(minutes=minute), weight_version=version)

    assert served_versions(lake) is None
    rows = [report("a", 100, 7), report("a", 40, 6), report("closed", 39, 2), report("b", 41, 5), report("c", 90, None)]
    lake.append("usage", rows, "records", 1)
    assert served_versions(lake) == {5, 7}


def save_checkpoint(
    folder: Path, step: int, version: int, experience: int, publication: Manifest | None = None
) -> Path:
    checkpoints = Checkpoints(folder, 3, lambda: AT)
    path = checkpoints.begin(step, version)
    state = State(step=step, weight_version=version, publication=publication)
    checkpoints.complete(path, state, Cursor(experience_version=experience, ledger_version=experience * 2))
    return path


def test_checkpoints_name_weight_versions_and_cursors(tmp_path: Path) -> None:
    assert (checkpoint_versions(tmp_path), cursors(tmp_path)) == (set(), {})
    publication = Manifest(version=4, files=(), fingerprint="0" * 64, created_at=AT)
    save_checkpoint(tmp_path, 10, 3, 20)
    save_checkpoint(tmp_path, 20, 4, 30, publication)
    Checkpoints(tmp_path, 3, lambda: AT).begin(30, 5)
    assert checkpoint_versions(tmp_path) == {3, 4}
    assert cursors(tmp_path) == {"experience": 20, "ledger": 40}


def test_a_checkpoint_that_cannot_be_read_stops_the_removal(tmp_path: Path) -> None:
    (save_checkpoint(tmp_path, 10, 3, 20) / "MANIFEST.json").write_text("{}")
    with pytest.raises(LagoonError, match="nothing that it may name is removed"):
        checkpoint_versions(tmp_path)


def run_settings(folder: Path, *overrides: str) -> Settings:
    return load(overrides=[f"--run.data_dir={folder}", "--maintenance.min_files=2", *overrides])


def test_a_pass_does_all_of_it_and_says_what_it_did(tmp_path: Path) -> None:
    settings = run_settings(tmp_path, "--maintenance.keep_weight_versions=4")
    lake, store = Lake.of(settings), WeightStore.of(settings)
    lake.ensure()
    long_log(lake)
    publish(store, tmp_path / "model", *range(1, 10))
    lake.append("usage", [row("usage", instance="r", weight_version=5)], "records", 1)
    lake.append("evals", [row("evals", end_version=3, score=0.9, low=0.8)], "records", 1)
    save_checkpoint(settings.run.folder / "checkpoints", 10, 4, 4)
    orphan = Path(lake.table_uri("experience"), "orphan.parquet")
    orphan.write_bytes(b"12345")
    age(orphan.parent, orphan.name)
    assert Upkeep(settings).run() == []
    assert store.versions() == [1, 3, 4, 5, 6, 7, 8, 9]  # 1 is what the KL term refers to
    assert (log_files(lake, "json")[0], orphan.exists()) == (3, False)
    assert table(lake).to_pyarrow_table().num_rows == 6
    assert REGISTRY.get_sample_value("lagoon_lake_files", {"table": "experience"}) == 1


def test_without_any_report_of_use_no_weights_go(tmp_path: Path) -> None:
    settings = run_settings(tmp_path, "--maintenance.keep_weight_versions=4")
    Lake.of(settings).ensure()
    store = WeightStore.of(settings)
    publish(store, tmp_path / "model", *range(1, 7))
    assert Upkeep(settings).run() == []
    assert store.versions() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("lora_rank", "left"), [(0, [3, 4, 5, 6]), (2, [1, 3, 4, 5, 6])])
def test_what_adapters_change_stays_though_no_version_builds_on_it(
    tmp_path: Path, lora_rank: int, left: list[int]
) -> None:
    options = ("--maintenance.keep_weight_versions=4", "--objective.kl=0", f"--learner.lora_rank={lora_rank}")
    settings = run_settings(tmp_path, *options)
    lake, store = Lake.of(settings), WeightStore.of(settings)
    lake.ensure()
    lake.append("usage", [row("usage", instance="r")], "records", 1)
    publish(store, tmp_path / "model", *range(1, 7))
    assert Upkeep(settings).run() == []
    assert store.versions() == left


DAY_MS = 86_400_000


def away_for(lake: Lake, days: int) -> None:
    """As if all that was written to `experience` had been written `days` days earlier."""
    folder = Path(lake.table_uri("experience"))
    for path in folder.glob("_delta_log/*.json"):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        for cells in (cells for action in actions for cells in action.values()):
            moved = cells.keys() & {"timestamp", "modificationTime", "deletionTimestamp"}
            cells.update({name: cells[name] - days * DAY_MS for name in moved})
        path.write_text("".join(json.dumps(action) + "\n" for action in actions))
    age(folder, at=time.time() - days * 86_400)


@pytest.mark.parametrize(("read", "unread"), [(None, ["1/0", "2/0", "3/0"]), (1, ["2/0", "3/0"])])
def test_a_learner_that_was_away_for_longer_than_the_retention_reads_what_was_merged_meanwhile(
    tmp_path: Path, read: int | None, unread: list[str]
) -> None:
    settings = run_settings(tmp_path)
    lake = Lake.of(settings)
    lake.ensure()
    for sequence in range(1, 4):
        append(lake, sequence)
    if read is not None:
        save_checkpoint(settings.checkpoints, 10, 4, read)
    assert squeeze(lake) == 3
    away_for(lake, days=20)
    assert Upkeep(settings).run() == []
    tail = Tail(lake, "experience", -1 if read is None else read, ["trajectory_id"])
    assert [name for _, rows in tail.poll() for name in rows["trajectory_id"].to_pylist()] == unread


def test_what_every_checkpoint_has_read_is_vacuumed_after_the_retention(tmp_path: Path) -> None:
    settings = run_settings(tmp_path)
    lake = Lake.of(settings)
    lake.ensure()
    for sequence in range(1, 4):
        append(lake, sequence)
    assert squeeze(lake) == 3
    away_for(lake, days=20)
    save_checkpoint(settings.checkpoints, 10, 4, lake.version("experience"))
    assert Upkeep(settings).run() == []
    assert [path.name for path in Path(lake.uri).glob("experience/version_bucket=0/*")] == [
        Path(uri).name for uri in table(lake).file_uris()
    ]


def test_a_damaged_checkpoint_keeps_logs_and_files_and_weights_and_is_reported(tmp_path: Path) -> None:
    settings = run_settings(tmp_path)
    lake = Lake.of(settings)
    lake.ensure()
    long_log(lake)
    assert squeeze(lake) == 6
    away_for(lake, days=20)
    lake.append("usage", [row("usage", instance="r")], "records", 1)
    folder = save_checkpoint(settings.run.folder / "checkpoints", 10, 4, 6)
    (folder / "cursor.json").write_text("{")
    [fault] = Upkeep(settings).run()
    assert fault.startswith("cursors: ")
    assert log_files(lake, "json")[0] == 0
    assert len(list(Path(lake.uri).glob("experience/version_bucket=0/*"))) == 7


def test_vacuums_are_as_rare_as_the_settings_say(tmp_path: Path) -> None:
    settings = run_settings(tmp_path, "--maintenance.vacuum_every_s=600")
    lake = Lake.of(settings)
    lake.ensure()
    now = [AT]
    upkeep = Upkeep(settings, now=lambda: now[-1])
    left = []
    for number, minutes in enumerate((0, 9, 10)):
        now.append(AT + timedelta(minutes=minutes))
        orphan = Path(lake.table_uri("groups"), f"orphan-{number}.parquet")
        orphan.write_bytes(b"x")
        age(orphan.parent, orphan.name)
        assert upkeep.run() == []
        left.append(len(list(orphan.parent.glob("orphan-*"))))
    assert left == [0, 1, 0]


def letter(settings: Settings, claim: Claim, offset: int, **cells: object) -> dict[str, object]:
    headers = json.dumps([[name, value.hex()] for name, value in claim.header.items()])
    values = {"topic": "trajectories", "offset": offset, "kind": "undecodable", "value": claim.to_bytes()}
    return row("dead_letters", **values | {"headers": headers} | cells)


def test_a_claim_goes_when_kafka_has_removed_its_message_and_no_letter_names_it(tmp_path: Path) -> None:
    settings = run_settings(tmp_path, "--kafka.retention_h=24", "--maintenance.vacuum_retention_h=24")
    lake, claims = Lake.of(settings), Claims.of(settings)
    lake.ensure()
    read, unread, sent_again, sent_long_ago, young = (claims.put(name.encode()) for name in "abcde")
    at = time.time()
    for claim in (read, unread, sent_again, sent_long_ago):
        age(Path(claims.uri), claim.sha256, at - (24 + 8 * 24 + 1) * 3600)  # a day of Kafka's, eight of slack
    age(Path(claims.uri), young.sha256, at - (24 + 8 * 24 - 1) * 3600)
    now = datetime.now(UTC)
    rows = [
        letter(settings, unread, 1),
        letter(settings, sent_again, 2),
        row("dead_letters", kind="replayed", offset=8, replayed_from="trajectories/0/2", at=now - timedelta(days=8)),
        letter(settings, sent_long_ago, 3),
        row("dead_letters", kind="replayed", offset=9, replayed_from="trajectories/0/3", at=now - timedelta(days=10)),
        letter(settings, read, 4, value=b"{"),
    ]
    lake.append("dead_letters", rows, "curate", 1)
    assert Upkeep(settings).run() == []
    left = {path.name for path in Path(claims.uri).iterdir()}
    assert left == {unread.sha256, sent_again.sha256, young.sha256}


def test_a_claim_that_is_sent_after_a_long_wait_counts_as_new(tmp_path: Path) -> None:
    settings = run_settings(tmp_path)
    claims = Claims.of(settings)
    claim = claims.put(b"waited for Kafka")
    age(Path(claims.uri), claim.sha256)
    assert claims.put(b"waited for Kafka") == claim
    assert remove_claims(claims, Lake.of(settings), 1, datetime.now(UTC)) == (0, 0)


def test_settings_refuse_a_retention_that_would_remove_what_is_needed() -> None:
    with pytest.raises(SettingsError, match=r"vacuum_retention_h 168 is below kafka\.retention_h 200"):
        load(overrides=["--kafka.retention_h=200"])
    with pytest.raises(SettingsError, match=r"keep_weight_versions 3 must be above loop\.max_staleness 3"):
        load(overrides=["--maintenance.keep_weight_versions=3"])
    with pytest.raises(SettingsError, match="vacuum_retention_h"):
        load(overrides=["--kafka.retention_h=1", "--maintenance.vacuum_retention_h=1"])
