"""Versions published as deltas: readers fetch what they lack, and serve nothing that is not what its manifest says."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from infra.maintenance.retention import remove_versions
from infra.weight_files import holds
from infra.weights import describe, fingerprint_file
from schemas.errors import WeightStoreError
from schemas.messages import File
from tests.manifests import flip
from tests.snapshots import DELTA, Line, fetched


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def test_between_full_versions_deltas_are_published_and_give_the_same_files(tmp_path: Path):
    line = Line(tmp_path, full_every=4)
    line.publish(*range(1, 8))
    assert line.kinds() == "fdddfdd"
    for version in line.store.versions():
        assert line.is_exact(version, line.store.fetch(version, tmp_path / f"cache-{version}"))


def test_a_delta_holds_the_changed_files_only_and_few_of_the_bytes(line: Line):
    line.publish(1, 2)
    line.publish(3, config='{"a": 1}')
    assert [file.name for file in line.store.manifest(2).files] == [DELTA]
    assert sorted(file.name for file in line.store.manifest(3).files) == ["config.json", DELTA]
    # a row is a quarter of a block: 16 KiB of noise, a header, an index row; 17 KiB hold them
    assert line.store.manifest(2).num_bytes <= 17 * 1024 + 1024 + 16
    assert line.store.manifest(2).fingerprint == fingerprint_file(line.folders[2] / "model.safetensors")


def test_a_reader_fetches_only_what_it_lacks(line: Line, tmp_path: Path):
    line.publish(1, 2, 3)
    store, cache = line.store, tmp_path / "cache"
    with fetched("full", lambda: store.manifest(1).num_bytes):
        store.fetch(1, cache)
    both = store.manifest(2).num_bytes + store.manifest(3).num_bytes
    with fetched("full", lambda: 0), fetched("delta", lambda: both):
        assert line.is_exact(3, store.fetch(3, cache))


def test_a_reader_far_behind_takes_the_newest_full_version_not_the_chain(tmp_path: Path):
    line = Line(tmp_path, full_every=4)
    line.publish(*range(1, 7))
    store, cache = line.store, tmp_path / "cache"
    assert line.kinds() == "fdddfd"
    store.fetch(1, cache)
    with fetched("full", lambda: store.manifest(5).num_bytes), fetched("delta", lambda: store.manifest(6).num_bytes):
        assert line.is_exact(6, store.fetch(6, cache))


def test_a_change_of_most_weights_is_published_full(line: Line):
    # 40 of 64 rows of noise are more than half the bytes; 20 are not, but three times 20 are about all of them
    line.publish(1)
    line.publish(2, rows=40)
    line.publish(3, 4, 5, 6, rows=20)
    assert line.kinds() == "ffdddf"


def test_other_tensors_or_shards_are_published_full(line: Line):
    line.publish(1)
    made = line.make(2)
    save_file({"v": line.weights}, line.folders[2] / "model.safetensors")
    print_ = fingerprint_file(line.folders[2] / "model.safetensors")
    made = made.model_copy(update={"files": describe(line.folders[2]), "fingerprint": print_})
    assert line.store.publish(line.folders[2], made, line.folders[1])
    assert line.kinds() == "ff"


def test_a_folder_that_is_not_the_parent_makes_no_delta(line: Line):
    line.publish(1)
    made = line.make(2)
    flip(line.folders[1] / "model.safetensors")
    assert line.store.publish(line.folders[2], made, line.folders[1])
    assert line.kinds() == "ff"


def test_on_a_damaged_parent_a_full_version_is_published(line: Line, tmp_path: Path):
    line.publish(1, 2)
    line.place(2, "MANIFEST.json").write_text("{}")
    line.publish(3)
    assert line.store.manifest(3).kind == "full"
    assert line.is_exact(3, line.store.fetch(3, tmp_path / "cache"))


def test_a_version_published_twice_is_one_version_whether_full_or_delta(line: Line, tmp_path: Path):
    line.publish(1, 2)
    made = line.make(3)
    assert line.store.publish(line.folders[3], made, line.folders[2]) is True
    assert line.store.publish(line.folders[3], made, line.folders[2]) is False
    assert line.store.publish(line.folders[3], made) is False  # a new life has no parent at hand
    assert line.kinds() == "fdd"
    other = Line(tmp_path / "other")
    with pytest.raises(WeightStoreError, match="already published"):
        line.store.publish(tmp_path / "other" / "made-3", other.make(3), line.folders[2])


def test_what_a_crash_left_of_a_full_publication_is_no_part_of_the_delta(line: Line, tmp_path: Path):
    line.publish(1)
    line.place(2).parent.mkdir()
    save_file({"old": np.zeros(3, np.float32)}, line.place(2, "model-00002-of-00002.safetensors"))
    line.publish(2)
    assert line.is_exact(2, line.store.fetch(2, tmp_path / "cache"))


def test_a_delta_that_does_not_arrive_whole_changes_nothing_until_it_is_repaired(line: Line, tmp_path: Path):
    line.publish(1, 2, 3)
    cache, sound = tmp_path / "cache", line.place(2).read_bytes()
    line.store.fetch(1, cache)
    flip(line.place(2))
    for version in (2, 3):
        with pytest.raises(WeightStoreError, match=rf"version 2, file {DELTA}"):
            line.store.fetch(version, cache)
    assert [p.name for p in cache.glob("v*")] == ["v00000001"]
    assert line.is_exact(1, cache / "v00000001")
    line.place(2).write_bytes(sound)
    with fetched("delta", lambda: line.store.manifest(2).num_bytes):  # version 3's is here already
        assert line.is_exact(3, line.store.fetch(3, cache))
    assert [p.name for p in cache.iterdir() if p.name.startswith(".")] == []


def test_a_spoiled_base_is_not_built_upon(line: Line, tmp_path: Path):
    line.publish(1, 2)
    held = line.store.fetch(1, tmp_path / "cache")
    flip(held / "model.safetensors")
    with fetched("full", lambda: line.store.manifest(1).num_bytes):
        assert line.is_exact(2, line.store.fetch(2, tmp_path / "cache"))


def test_a_download_that_broke_off_goes_on_where_it_ended(line: Line, tmp_path: Path):
    line.publish(1)
    [weights] = [file for file in line.store.manifest(1).files if file.name == "model.safetensors"]
    part = tmp_path / "cache" / ".v00000001.part" / "v00000001" / weights.name
    part.parent.mkdir(parents=True)
    part.write_bytes(line.place(1, weights.name).read_bytes()[:1_000_000])
    with fetched("full", lambda: line.store.manifest(1).num_bytes - 1_000_000):
        assert line.is_exact(1, line.store.fetch(1, tmp_path / "cache"))


def test_a_wrong_beginning_is_found_and_fetched_anew(line: Line, tmp_path: Path):
    line.publish(1)
    part = tmp_path / "cache" / ".v00000001.part" / "v00000001" / "model.safetensors"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1000))
    with pytest.raises(WeightStoreError, match=r"model\.safetensors"):
        line.store.fetch(1, tmp_path / "cache")
    assert line.is_exact(1, line.store.fetch(1, tmp_path / "cache"))


def test_a_kept_delta_keeps_all_that_it_builds_on(tmp_path: Path):
    line = Line(tmp_path, full_every=4)
    line.publish(*range(1, 8))  # f d d d f d d
    removed, _ = remove_versions(line.store, keep=1, named={3})
    assert (removed, line.store.versions()) == ([4], [1, 2, 3, 5, 6, 7])
    for version in line.store.versions():
        assert line.is_exact(version, line.store.fetch(version, tmp_path / "cache"))
    removed, _ = remove_versions(line.store, keep=1, named=())
    assert line.store.versions() == [5, 6, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parent": None}, "delta on version None"),
        ({"parent": 2}, "delta on version 2"),
        ({"parent": 3}, "delta on version 3"),
        ({"whole": ()}, "expected at least one safetensors file"),
        ({"files": (File(name="other.delta.safetensors", num_bytes=1, sha256="0" * 64),)}, "no part of it"),
        ({"files": (File(name="extra.json", num_bytes=1, sha256="0" * 64),)}, "no part of it"),
    ],
)
def test_a_delta_that_does_not_say_what_it_makes_of_what_is_refused(
    line: Line, tmp_path: Path, change: dict[str, object], message: str
):
    line.publish(1, 2)
    forged = line.store.manifest(2).model_copy(update=change)
    line.place(2, "MANIFEST.json").write_bytes(forged.to_bytes())
    with pytest.raises(WeightStoreError, match=message):
        line.store.fetch(2, tmp_path / "cache")


def test_a_delta_that_makes_other_weights_than_its_manifest_says_is_never_visible(line: Line, tmp_path: Path):
    line.publish(1, 2, 3)
    line.place(2).write_bytes(line.place(3).read_bytes())  # sound, but of another base
    forged = line.store.manifest(2).model_copy(update={"files": line.store.manifest(3).files})
    line.place(2, "MANIFEST.json").write_bytes(forged.to_bytes())
    with pytest.raises(WeightStoreError, match="version 2"):
        line.store.fetch(2, tmp_path / "cache")
    assert list((tmp_path / "cache").glob("v*")) == []


def test_a_fetched_delta_can_be_built_upon(line: Line, tmp_path: Path):
    line.publish(1, 2)
    folder = line.store.fetch(2, tmp_path / "cache")
    assert holds(folder, line.store.manifest(2))
    line.publish(3)
    with fetched("delta", lambda: line.store.manifest(3).num_bytes):
        assert line.is_exact(3, line.store.fetch(3, tmp_path / "cache"))
    np.testing.assert_array_equal(load_file(tmp_path / "cache/v00000003/model.safetensors")["w"], line.weights)
