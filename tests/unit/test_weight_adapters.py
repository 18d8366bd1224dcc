"""Versions published as adapters: merged to the same bits everywhere, and served only if they are what was trained."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from infra.maintenance.retention import remove_versions
from infra.weight_adapters import add, makes, merged
from infra.weight_cache import prune
from infra.weights import Adapters, describe, fingerprint_file
from schemas.errors import WeightStoreError
from tests.manifests import flip
from tests.snapshots import ADAPTERS, AdaptersLine, fetched

DIGEST = """
import hashlib, os, sys
import numpy as np
from infra import weight_adapters
os.cpu_count = lambda: int(sys.argv[1])
weight_adapters._BLOCK_VALUES = int(sys.argv[2])
random, found = np.random.default_rng(0), hashlib.sha256()
for rows, columns, rank in ((1, 1, 1), (7, 1000, 3), (576, 192, 8), (100, 3001, 33)):
    shapes = (rows, columns), (rank, columns), (rows, rank)
    plain = [(random.standard_normal(s) * np.exp(3 * random.standard_normal(s))).astype("f4") for s in shapes]
    for parts in plain, [(x.view("u4") >> 16).astype("u2") for x in plain]:
        found.update(weight_adapters.merged(*parts, 16 / 3).tobytes())
print(found.hexdigest())
"""
"""Of merged weights of many sizes and magnitudes, in both dtypes."""
OLDER = "X86_V3 X86_V4"
"""What numpy does without on an older processor."""


def float32(*rows: object) -> np.ndarray:
    return np.array(rows, np.float32)


def bfloat16(tensor: torch.Tensor) -> np.ndarray:
    return tensor.bfloat16().view(torch.int16).numpy().view(np.uint16)


@pytest.fixture
def line(tmp_path: Path) -> AdaptersLine:
    return AdaptersLine(tmp_path, full_every=2)


def test_an_update_is_the_scaled_sum_of_the_products() -> None:
    # B A = [0.5 (1, 1) + 1 (0, 2), 0 (1, 1) + 3 (0, 2)] = [(0.5, 2.5), (0, 6)]; W + 2 B A
    weight, down, up = float32([1, 2], [3, 4]), float32([1, 1], [0, 2]), float32([0.5, 1], [0, 3])
    assert merged(weight, down, up, 2.0).tolist() == [[2, 7], [3, 16]]


@pytest.mark.parametrize(("a", "expected"), [((2**24, 1, -(2**24)), 0.0), ((2**24, -(2**24), 1), 1.0)])
def test_products_are_summed_one_by_one_in_their_order(a: tuple[int, ...], expected: float) -> None:
    # in float32 2^24 + 1 is 2^24
    assert merged(float32([0]), float32(*[[x] for x in a]), float32([1, 1, 1]), 1.0).tolist() == [[expected]]


def test_sums_are_rounded_to_bfloat16_once_and_between_two_to_the_even_one() -> None:
    # from 1 to 2 bfloat16 lie 2^-7 apart: 1 + 2^-8 lies between 1 and 1 + 2^-7, 1 + 3 2^-8 between that and 1 + 2^-6
    weight, down = bfloat16(torch.ones(1, 4)), bfloat16(torch.tensor([[1.0, 3, 1 + 2**-7, -1]]) * 2**-8)
    made = merged(weight, down, bfloat16(torch.ones(1, 1)), 1.0).view(np.int16)
    assert torch.from_numpy(made).view(torch.bfloat16).tolist() == [[1, 1 + 2**-6, 1 + 2**-7, 1 - 2**-8]]


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    values = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-38, 26, 1 / 64)
    values[0, :3] = torch.tensor([torch.inf, -torch.inf, 3.4e38])
    zero = bfloat16(torch.zeros(1, 4096))
    assert merged(zero, values.numpy(), float32([1]), 1.0).tobytes() == bfloat16(values).tobytes()


def test_adapters_that_change_nothing_leave_every_bit() -> None:
    weight = float32([-0.0, np.nan, np.inf, 1e-45])
    assert merged(weight, float32([1, 1, 1, 1]), float32([0]), 1.0).tobytes() == weight.tobytes()


def test_other_processes_threads_blocks_and_processors_make_the_same_bits() -> None:
    found: set[str] = set()
    for threads, block, without in ((1, 2**15, ""), (5, 2**15, OLDER), (3, 1000, "")):
        environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": without, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-W", "ignore", "-c", DIGEST, str(threads), str(block)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop()) == len("\n") + 64


def test_after_the_base_adapters_alone_are_published_and_give_the_same_files(line: AdaptersLine, tmp_path: Path):
    line.publish(*range(1, 6))
    assert line.kinds() == "faaaa"  # 3 and 5 would be full, were they deltas
    for version in line.store.versions():
        assert line.is_exact(version, line.store.fetch(version, tmp_path / f"cache-{version}"))
        assert line.store.manifest(version).fingerprint == fingerprint_file(line.folders[version] / "model.safetensors")
    # A is 2 x 4096 values and B 64 x 2 of them, W 64 x 4096: 33,280 bytes of 1,048,576, and a header
    assert line.store.manifest(5).num_bytes <= 33_280 + 512
    assert [file.name for file in line.store.manifest(5).files] == [ADAPTERS]


def test_a_reader_fetches_the_base_once_and_of_each_version_the_adapters(line: AdaptersLine, tmp_path: Path):
    line.publish(1, 2, 3, 4)
    store, cache = line.store, tmp_path / "cache"
    sizes = {version: store.manifest(version).num_bytes for version in store.versions()}
    with fetched("full", lambda: sizes[1]), fetched("adapters", lambda: sizes[3]):  # anew: the newest, not the chain
        assert line.is_exact(3, store.fetch(3, cache))
    prune(cache, [3])
    assert sorted(p.name for p in cache.glob("v*")) == ["v00000001", "v00000003"]
    with fetched("full", lambda: 0), fetched("adapters", lambda: sizes[4]):
        assert line.is_exact(4, store.fetch(4, cache))


def test_a_changed_configuration_comes_with_the_adapters(line: AdaptersLine, tmp_path: Path):
    line.publish(1)
    line.publish(2, config='{"a": 1}')
    assert sorted(file.name for file in line.store.manifest(2).files) == ["config.json", ADAPTERS]
    assert line.is_exact(2, line.store.fetch(2, tmp_path / "cache"))


def test_kept_adapters_keep_their_base(line: AdaptersLine, tmp_path: Path):
    line.publish(*range(1, 6))
    remove_versions(line.store, keep=1, named={3})
    assert line.store.versions() == [1, 3, 5]
    assert line.is_exact(5, line.store.fetch(5, tmp_path / "cache"))


def test_damaged_adapters_change_nothing_until_they_are_repaired(line: AdaptersLine, tmp_path: Path):
    line.publish(1, 2, 3)
    cache, sound = tmp_path / "cache", line.place(3, ADAPTERS).read_bytes()
    line.store.fetch(2, cache)
    flip(line.place(3, ADAPTERS))
    with pytest.raises(WeightStoreError, match=rf"version 3, file {ADAPTERS}"):
        line.store.fetch(3, cache)
    assert sorted(p.name for p in cache.glob("v*")) == ["v00000001", "v00000002"]
    assert line.is_exact(2, cache / "v00000002")
    line.place(3, ADAPTERS).write_bytes(sound)
    assert line.is_exact(3, line.store.fetch(3, cache))


def test_other_adapters_than_the_manifest_means_are_never_visible(line: AdaptersLine, tmp_path: Path):
    line.publish(1, 2, 3)
    shutil.copyfile(line.place(3, ADAPTERS), line.place(2, ADAPTERS))  # sound, but of another version
    forged = line.store.manifest(2).model_copy(update={"files": line.store.manifest(3).files})
    line.place(2, "MANIFEST.json").write_bytes(forged.to_bytes())
    with pytest.raises(WeightStoreError, match=r"version 2, file model\.safetensors"):
        line.store.fetch(2, tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").glob("v*")] == ["v00000001"]


def test_a_spoiled_base_is_fetched_anew(line: AdaptersLine, tmp_path: Path):
    line.publish(1, 2)
    flip(line.store.fetch(1, tmp_path / "cache") / "model.safetensors")
    with fetched("full", lambda: line.store.manifest(1).num_bytes):
        assert line.is_exact(2, line.store.fetch(2, tmp_path / "cache"))


def test_on_another_base_adapters_are_refused(line: AdaptersLine, tmp_path: Path):
    line.publish(1, 2)
    other = AdaptersLine(tmp_path / "other")
    other.weights = other.weights + 1
    other.publish(1)
    shutil.copytree(other.place(1).parent, line.place(1).parent, dirs_exist_ok=True)
    with pytest.raises(WeightStoreError, match=r"version 2, file model\.safetensors"):
        line.store.fetch(2, tmp_path / "cache")


@pytest.mark.parametrize(
    ("base", "message"),
    [(None, "adapters of version None"), (3, "adapters of version 3"), (2, "adapters of version 2, a adapters")],
)
def test_adapters_of_no_earlier_full_version_are_refused(
    line: AdaptersLine, tmp_path: Path, base: int | None, message: str
):
    line.publish(1, 2, 3)
    forged = line.store.manifest(3).model_copy(update={"base": base})
    line.place(3, "MANIFEST.json").write_bytes(forged.to_bytes())
    with pytest.raises(WeightStoreError, match=message):
        line.store.fetch(3, tmp_path / "cache")


def test_adapters_that_do_not_make_the_version_or_save_too_little_are_not_published(line: AdaptersLine):
    line.publish(1)
    line.publish(2, rows=40)  # A has 40 rows, W 64
    made = line.make(3)
    others = Adapters(line.file(2), line.folders[1], line.store.manifest(1))
    assert line.store.publish(line.folders[3], made, None, others)
    assert line.kinds() == "fff"


def test_each_publication_is_of_its_own_kind_and_may_build_on_any_other(tmp_path: Path):
    line = AdaptersLine(tmp_path)
    line.publish(1, 2)
    made, weights = line.make(3), load_file(line.folders[2] / "model.safetensors")
    weights["x.weight"][0] += 1  # a step of all weights: one row, on top of version 2
    save_file(weights, line.folders[3] / "model.safetensors")
    changes = {
        "files": describe(line.folders[3]),
        "fingerprint": fingerprint_file(line.folders[3] / made.files[1].name),
    }
    assert line.store.publish(line.folders[3], made.model_copy(update=changes), line.folders[2])
    line.publish(4)
    assert line.kinds() == "fada"
    for version in line.store.versions():
        assert line.is_exact(version, line.store.fetch(version, tmp_path / f"cache-{version}"))
    remove_versions(line.store, keep=1, named={3})
    assert line.store.versions() == [1, 2, 3, 4]


def test_a_version_published_twice_is_one_version_with_or_without_adapters(line: AdaptersLine):
    line.publish(1, 2)
    made = line.store.manifest(2).model_copy(update={"kind": "full", "base": None, "files": describe(line.folders[2])})
    assert line.store.publish(line.folders[2], made.model_copy(update={"whole": ()})) is False
    assert line.kinds() == "fa"


GOOD = {"x.lora_A": float32([1, 2]), "x.lora_B": float32([1], [1], [1]), "scale": np.float32(1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": None}, r"\['scale'\] are missing"),
        ({"scale": float32(1, 2)}, "expected one F32"),
        ({"x.lora_B": None}, r"\['x.lora_B'\] are missing"),
        ({"extra": float32(1)}, r"\['extra'\] are missing or too many"),
        ({"y.lora_A": float32([1]), "y.lora_B": float32([1])}, r"\['y.weight'\], which its base lacks"),
        ({"x.lora_A": float32([1, 2, 3])}, "which make no"),
        ({"x.lora_A": float32([1, 2], [1, 2])}, "which make no"),
        ({"x.lora_A": float32(1, 2)}, "which make no"),
        ({"x.lora_A": np.zeros((0, 2), np.float32), "x.lora_B": np.zeros((3, 0), np.float32)}, "which make no"),
        ({"x.lora_A": np.ones((1, 2))}, "made of"),
    ],
)
def test_malformed_adapters_are_refused(tmp_path: Path, change: dict[str, np.ndarray | None], message: str):
    parts = {name: np.asarray(x) for name, x in (GOOD | change).items() if x is not None}
    save_file(parts, tmp_path / ADAPTERS)
    save_file({"x.weight": np.zeros((3, 2), np.float32)}, tmp_path / "base.safetensors")
    with pytest.raises(WeightStoreError, match=message):
        add(tmp_path / "base.safetensors", tmp_path / ADAPTERS)


def test_a_file_is_what_adapters_make_only_if_every_byte_is(tmp_path: Path):
    base, new, adapters = (tmp_path / name for name in ("base", "new", ADAPTERS))
    save_file({name: np.asarray(x) for name, x in GOOD.items()}, adapters)
    save_file({"a": np.ones(3, np.float32), "x.weight": np.zeros((3, 2), np.float32), "z": np.ones(3)}, base)
    shutil.copyfile(base, new)
    add(new, adapters)
    assert load_file(new)["x.weight"].tolist() == [[1, 2]] * 3
    sound = new.read_bytes()
    for place in range(len(sound)):
        new.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        assert not makes(base, adapters, new), place
    new.write_bytes(sound)
    assert makes(base, adapters, new)
