"""Run manifests: whole or passed over by name, never rewritten, checked against what they name."""

from pathlib import Path

import pytest

from infra import retries
from infra.lake import Lake
from infra.run_manifests import RunManifests, evaluated_version, settings_hash, table_versions
from schemas.errors import LakeError
from schemas.settings import load
from tests.flaky_store import FlakyStore
from tests.manifests import run_manifest
from tests.rows import row


@pytest.fixture
def manifests(tmp_path: Path) -> RunManifests:
    return RunManifests(Lake(str(tmp_path / "lake")))


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "lake" / "_lagoon" / "run").glob("*.json"))


def test_manifests_are_numbered_and_the_newest_comes_first(manifests: RunManifests) -> None:
    for step in (10, 20, 30):
        manifests.write(run_manifest(train_step=step))
    found = list(manifests.newest_first([]))
    assert [(m.sequence, m.train_step) for m in found] == [(3, 30), (2, 20), (1, 10)]


def test_a_number_that_another_writer_took_is_never_rewritten(tmp_path: Path, manifests: RunManifests) -> None:
    first = manifests.write(run_manifest(train_step=10))
    before = files(tmp_path)[0].read_bytes()
    second = RunManifests(Lake(str(tmp_path / "lake"))).write(run_manifest(train_step=10))
    assert (first.sequence, second.sequence) == (1, 2)
    assert files(tmp_path)[0].read_bytes() == before


@pytest.mark.parametrize("damage", [b"", b'{"sequence":2', "half", "flip", "number"])
def test_a_damaged_manifest_is_passed_over_by_name(
    tmp_path: Path, manifests: RunManifests, damage: bytes | str
) -> None:
    manifests.write(run_manifest(train_step=10))
    manifests.write(run_manifest(train_step=20))
    newest = files(tmp_path)[1]
    body = newest.read_bytes()
    spoiled = {
        "half": body[: len(body) // 2],
        "flip": body.replace(b'"train_step":20', b'"train_step":21'),
        "number": files(tmp_path)[0].read_bytes(),
    }
    newest.write_bytes(damage if isinstance(damage, bytes) else spoiled[damage])
    damaged: list[str] = []
    assert next(manifests.newest_first(damaged)).train_step == 10
    assert len(damaged) == 1
    assert "run manifest 2" in damaged[0]


def test_the_oldest_are_pruned(manifests: RunManifests) -> None:
    for step in range(5):
        manifests.write(run_manifest(train_step=step))
    assert manifests.prune(keep=2) == 3
    assert manifests.sequences() == [5, 4]
    assert manifests.write(run_manifest(train_step=9)).sequence == 6


def test_a_manifest_that_went_since_they_were_listed_is_named(tmp_path: Path, manifests: RunManifests) -> None:
    for step in (10, 20):
        manifests.write(run_manifest(train_step=step))
    damaged: list[str] = []
    found = manifests.newest_first(damaged)
    assert next(found).train_step == 20
    files(tmp_path)[0].unlink()
    assert list(found) == []
    assert "run manifest 1" in damaged[0]


def test_a_store_that_refuses_each_request_once_keeps_no_manifest_from_being_written_or_read(
    manifests: RunManifests,
) -> None:
    manifests._store = FlakyStore(manifests._store)  # type: ignore[assignment]
    manifests.write(run_manifest(train_step=10))
    damaged: list[str] = []
    assert [m.train_step for m in manifests.newest_first(damaged)] == [10]
    assert damaged == []


def test_a_store_that_is_away_makes_no_manifest_a_damaged_one(
    manifests: RunManifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        manifests.write(run_manifest(train_step=step))
    manifests._store = FlakyStore(manifests._store)  # type: ignore[assignment]
    assert manifests.sequences() == [2, 1]
    monkeypatch.setattr(retries, "ATTEMPTS", 1)
    damaged: list[str] = []
    with pytest.raises(LakeError, match=r"reading run manifest 2 .* 503 Slow Down"):
        next(manifests.newest_first(damaged))
    assert damaged == []


def test_what_was_evaluated_is_read_within_the_lakes_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.ensure()
    lake.append("evals", [row("evals", requested_version=7)], "test", 1)
    assert lake.version("evals") == 1
    [file] = map(Path, lake.table("evals").file_uris())
    aside = file.rename(file.with_suffix(".aside"))
    monkeypatch.setattr(retries, "ATTEMPTS", 2)
    with pytest.raises(LakeError, match="evals: reading what was evaluated failed 2 times"):
        evaluated_version(lake)
    aside.rename(file)
    assert evaluated_version(lake) == 7


def test_every_table_has_its_version(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.ensure()
    assert set(table_versions(lake).values()) == {0}
    assert len(table_versions(lake)) == 12


def test_places_and_addresses_do_not_shape_a_run() -> None:
    moved = load(overrides=["--run.data_dir=/elsewhere", "--run.life=2", "--kafka.brokers=a:1", "--policy.path=/p"])
    assert settings_hash(moved) == settings_hash(load())
    assert settings_hash(load(overrides=["--loop.max_staleness=1"])) != settings_hash(load())
