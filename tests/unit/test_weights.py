"""Weight versions are visible when complete, never change, and are proven when fetched."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from infra.weights import WeightStore, describe, exclusive_create_works, fingerprint, fingerprint_file
from schemas.errors import WeightStoreError
from schemas.messages import Manifest

AT = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(str(tmp_path / "store"))


def model(folder: Path, value: float = 1.0, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.full((2, 3), value, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def manifest(folder: Path, version: int, **values: object) -> Manifest:
    print_ = fingerprint_file(folder / "model.safetensors")
    fields = {"version": version, "files": describe(folder), "fingerprint": print_, "created_at": AT, **values}
    return Manifest.model_validate(fields)


def test_a_version_is_invisible_until_its_manifest_is_there(store: WeightStore, tmp_path: Path):
    half = tmp_path / "store" / "v00000003"
    model(half)
    assert (store.versions(), store.latest()) == ([], 0)
    with pytest.raises(WeightStoreError, match="never completed"):
        store.fetch(3, tmp_path / "cache")
    folder = model(tmp_path / "model")
    for version in (1, 2):
        assert store.publish(folder, manifest(folder, version)) is True
    assert (store.versions(), store.latest()) == ([1, 2], 2)


def test_publishing_the_same_content_twice_changes_nothing(store: WeightStore, tmp_path: Path):
    folder = model(tmp_path / "model")
    assert store.publish(folder, manifest(folder, 1)) is True
    again = manifest(folder, 1, created_at=datetime(2027, 1, 1, tzinfo=UTC))
    assert WeightStore(store.uri).publish(folder, again) is False
    assert store.manifest(1).created_at == AT


def test_a_version_is_never_rewritten_with_other_content(store: WeightStore, tmp_path: Path):
    first, second = model(tmp_path / "first", 1.0), model(tmp_path / "second", 2.0)
    store.publish(first, manifest(first, 1))
    with pytest.raises(WeightStoreError, match=r"already published.*immutable"):
        store.publish(second, manifest(second, 1))
    assert fingerprint_file(store.fetch(1, tmp_path / "cache") / "model.safetensors") == manifest(first, 1).fingerprint


def test_what_a_crash_left_behind_is_neither_used_nor_in_the_way(store: WeightStore, tmp_path: Path):
    leftover = model(tmp_path / "store" / "v00000009", 7.0)
    (leftover / "model-00002-of-00002.safetensors").write_bytes(save({"old": np.zeros(2, np.float32)}))
    folder = model(tmp_path / "model")
    assert store.publish(folder, manifest(folder, 9)) is True
    fetched = store.fetch(9, tmp_path / "cache")
    assert sorted(p.name for p in fetched.iterdir()) == ["MANIFEST.json", "config.json", "model.safetensors"]
    assert fingerprint_file(fetched / "model.safetensors") == manifest(folder, 9).fingerprint


def test_a_folder_that_is_not_what_its_manifest_says_is_not_published(store: WeightStore, tmp_path: Path):
    folder = model(tmp_path / "model")
    described = manifest(folder, 1)
    with pytest.raises(WeightStoreError, match="fingerprint"):
        store.publish(folder, described.model_copy(update={"fingerprint": "0" * 64}))
    model(folder, 2.0)
    with pytest.raises(WeightStoreError, match="the manifest says"):
        store.publish(folder, described)
    assert store.latest() == 0


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_flipped_byte_in_the_store_is_found_on_fetch(store: WeightStore, tmp_path: Path, name: str):
    folder = model(tmp_path / "model")
    store.publish(folder, manifest(folder, 1))
    stored = tmp_path / "store" / "v00000001" / name
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)
    with pytest.raises(WeightStoreError, match=name):
        store.fetch(1, tmp_path / "cache")
    assert list((tmp_path / "cache").glob("v*")) == []


def test_a_listed_file_that_is_missing_is_named(store: WeightStore, tmp_path: Path):
    folder = model(tmp_path / "model")
    store.publish(folder, manifest(folder, 1))
    (tmp_path / "store" / "v00000001" / "config.json").unlink()
    with pytest.raises(WeightStoreError, match=r"config\.json is missing though its manifest lists it"):
        store.fetch(1, tmp_path / "cache")


def test_a_fetched_version_is_kept_and_a_spoiled_copy_is_replaced(store: WeightStore, tmp_path: Path):
    folder = model(tmp_path / "model")
    store.publish(folder, manifest(folder, 1))
    fetched = store.fetch(1, tmp_path / "cache")
    inode = (fetched / "model.safetensors").stat().st_ino
    assert (store.fetch(1, tmp_path / "cache") / "model.safetensors").stat().st_ino == inode
    (fetched / "config.json").write_text("[]")
    assert (store.fetch(1, tmp_path / "cache") / "config.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "modeling.py", "weights.pkl"])
def test_pickles_and_code_are_no_part_of_a_version(tmp_path: Path, name: str):
    with pytest.raises(WeightStoreError, match="never pickles or code"):
        describe(model(tmp_path / "model", **{name: "x"}))


@pytest.mark.parametrize(
    "name", ["../../etc/passwd.json", "/etc/passwd.json", "a/b.json", ".hidden.json", "MANIFEST.json"]
)
def test_a_manifest_that_lists_a_path_outside_its_folder_is_refused(store: WeightStore, tmp_path: Path, name: str):
    folder = model(tmp_path / "model")
    store.publish(folder, manifest(folder, 1))
    path = tmp_path / "store" / "v00000001" / "MANIFEST.json"
    forged = json.loads(path.read_text())
    forged["files"][0]["name"] = name
    path.write_text(json.dumps(forged))
    with pytest.raises(WeightStoreError, match=r"malformed|may not be part"):
        store.fetch(1, tmp_path / "cache")


def test_a_link_is_not_followed(tmp_path: Path):
    folder = model(tmp_path / "model")
    (tmp_path / "secret.json").write_text("{}")
    (folder / "extra.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(WeightStoreError, match="not a plain file"):
        describe(folder)


@pytest.mark.parametrize("body", [b"", b"{", b'{"version": 1}', b"[]"])
def test_a_malformed_manifest_is_an_error_of_its_version(store: WeightStore, tmp_path: Path, body: bytes):
    path = tmp_path / "store" / "v00000001" / "MANIFEST.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(body)
    with pytest.raises(WeightStoreError, match=r"version 1 in .*malformed"):
        store.manifest(1)


def test_a_manifest_of_another_version_is_refused(store: WeightStore, tmp_path: Path):
    folder = model(tmp_path / "model")
    store.publish(folder, manifest(folder, 1))
    (tmp_path / "store" / "v00000001").rename(tmp_path / "store" / "v00000002")
    with pytest.raises(WeightStoreError, match=r"of version 2 .* says version 1"):
        WeightStore(store.uri).manifest(2)


def test_the_fingerprint_is_the_hash_of_name_dtype_shape_and_bytes(tmp_path: Path):
    array = np.array([[1, 2]], np.int32)
    expected = hashlib.sha256(b'["w", "I32", [1, 2]]' + b"\x01\0\0\0\x02\0\0\0").hexdigest()
    save_file({"w": array}, tmp_path / "a.safetensors", metadata={"note": "metadata is no part of the weights"})
    assert fingerprint({"w": array}) == fingerprint_file(tmp_path / "a.safetensors") == expected


ARRAYS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.builds(
        lambda dtype, shape: np.arange(np.prod(shape)).reshape(shape).astype(dtype),
        st.sampled_from(["float16", "float32", "float64", "int8", "int64", "uint8", "bool"]),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
    ),
    max_size=4,
)


@given(ARRAYS)
def test_a_fingerprint_does_not_depend_on_the_file_that_holds_the_tensors(tmp_path_factory, arrays: dict):
    path = tmp_path_factory.mktemp("f") / "m.safetensors"
    path.write_bytes(save(arrays))
    assert fingerprint_file(path) == fingerprint(dict(reversed(arrays.items())))


@pytest.mark.parametrize(
    "change",
    [
        lambda a: {"v": a},
        lambda a: {"w": a.reshape(3, 2)},
        lambda a: {"w": a.view(np.int32)},
        lambda a: {"w": a + 1},
    ],
)
def test_name_shape_dtype_and_values_all_count(change):
    array = np.ones((2, 3), np.float32)
    assert fingerprint(change(array)) != fingerprint({"w": array})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02\0\0\0\0\0\0\0",
        (2**62).to_bytes(8, "little") + b"{}",
        save({"w": np.ones(4, np.float32)})[:-4],
        b"\x02\0\0\0\0\0\0\0[]",
        (9).to_bytes(8, "little") + b'{"w": {}}',
    ],
)
def test_a_cut_off_or_malformed_safetensors_file_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightStoreError, match=r"m\.safetensors"):
        fingerprint_file(path)


def test_exclusive_creates_work_on_a_local_folder_and_leave_nothing_behind(tmp_path: Path):
    assert exclusive_create_works(str(tmp_path)) is True
    assert list(tmp_path.iterdir()) == []
