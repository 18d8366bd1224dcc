"""Run manifests: whole or passed over by name, never rewritten, checked against what they name."""

from pathlib import Path

import pytest

from infra.lake import Lake
from infra.run_manifests import RunManifests, settings_hash, table_versions
from schemas.errors import LakeError
from schemas.settings import load
from tests.manifests import run_manifest


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


def test_a_manifest_that_is_gone_is_an_error(manifests: RunManifests) -> None:
    with pytest.raises(LakeError, match="run manifest 7"):
        manifests.read(7)


def test_every_table_has_its_version(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lake.ensure()
    assert set(table_versions(lake).values()) == {0}
    assert len(table_versions(lake)) == 12


def test_places_and_addresses_do_not_shape_a_run() -> None:
    moved = load(overrides=["--run.data_dir=/elsewhere", "--run.life=2", "--kafka.brokers=a:1", "--policy.path=/p"])
    assert settings_hash(moved) == settings_hash(load())
    assert settings_hash(load(overrides=["--loop.max_staleness=1"])) != settings_hash(load())
