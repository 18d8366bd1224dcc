"""Deltas between files of tensors: lossless whatever the tensors and the changes, and no larger than the change."""

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from infra.weight_delta import BLOCK_BYTES, HEADER_BYTES, INDEX_BYTES, diff, patch
from schemas.errors import WeightStoreError

WIDTHS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
NO_LIMIT = 2**40
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def write(path: Path, tensors: Tensors) -> Path:
    """A safetensors file, byte by byte: any dtype, also those that numpy lacks."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, body) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(body)]}
        data += body
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def rebuild(base: Path, new: Path, folder: Path) -> tuple[bytes, int]:
    """What the delta makes of a copy of `base`, and the delta's bytes."""
    delta, copy = folder / "m.delta.safetensors", folder / "copy.safetensors"
    assert diff(base, new, delta, NO_LIMIT)
    copy.write_bytes(base.read_bytes())
    patch(copy, delta)
    return copy.read_bytes(), delta.stat().st_size


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensors, Tensors]:
    """Tensors, and the same ones changed: nothing, a few values, all values, noise in the low bytes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old: Tensors = {}
    new: Tensors = {}
    for name in draw(st.lists(st.sampled_from("abcdef"), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(WIDTHS)))
        shape = draw(st.sampled_from([(), (0,), (3, 0), (1,), (7, 5), (300, 301), (BLOCK_BYTES // WIDTHS[dtype],)]))
        body = rng.integers(0, 256, WIDTHS[dtype] * int(np.prod(shape)), np.uint8)
        share = draw(st.sampled_from([0.0, 0.001, 0.2, 1.0]))
        changed = body ^ (rng.random(body.shape) < share) * rng.integers(0, 256, body.shape, np.uint8)
        old[name], new[name] = (dtype, shape, body.tobytes()), (dtype, shape, changed.astype(np.uint8).tobytes())
    return old, new


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_the_delta_of_any_change_applied_to_the_old_gives_the_new_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, pair: tuple[Tensors, Tensors]
) -> None:
    folder = tmp_path_factory.mktemp("d")
    base, new = (write(folder / name, tensors) for name, tensors in zip(("a", "b"), pair, strict=True))
    assert rebuild(base, new, folder)[0] == new.read_bytes()


def blocks(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (number, BLOCK_BYTES), np.uint8)


def test_where_five_percent_of_the_blocks_change_five_percent_of_the_bytes_move(tmp_path: Path) -> None:
    # 100 blocks, of which 5 change into noise, which no code shortens: header, 5 index rows, 5 blocks
    old, new = blocks(100), blocks(100)
    new[[3, 40, 41, 77, 99]] = blocks(5, seed=1)
    save_file({"w": old}, tmp_path / "a")
    save_file({"w": new}, tmp_path / "b")
    content, num_bytes = rebuild(tmp_path / "a", tmp_path / "b", tmp_path)
    assert content == (tmp_path / "b").read_bytes()
    assert num_bytes == HEADER_BYTES + 5 * INDEX_BYTES + 5 * BLOCK_BYTES


def test_what_did_not_change_takes_nothing(tmp_path: Path) -> None:
    save_file({"w": blocks(3)}, tmp_path / "a")
    assert rebuild(tmp_path / "a", tmp_path / "a", tmp_path)[1] == HEADER_BYTES


def test_few_changed_values_take_few_bytes_each(tmp_path: Path) -> None:
    # one value of a block: 4 bytes of count, a zstd frame of 2 + 4 bytes (13 bytes around it at most)
    old = np.random.default_rng(0).standard_normal(BLOCK_BYTES // 4).astype(np.float32)
    new = old.copy()
    new[1234] += 1
    save_file({"w": old}, tmp_path / "a")
    save_file({"w": new}, tmp_path / "b")
    assert rebuild(tmp_path / "a", tmp_path / "b", tmp_path)[1] <= HEADER_BYTES + INDEX_BYTES + 4 + 6 + 13


def test_a_delta_is_a_safetensors_file(tmp_path: Path) -> None:
    save_file({"w": blocks(2)}, tmp_path / "a")
    save_file({"w": blocks(2, seed=1)}, tmp_path / "b")
    assert diff(tmp_path / "a", tmp_path / "b", tmp_path / "d", NO_LIMIT)
    with safe_open(tmp_path / "d", "np") as file:
        assert sorted(file.keys()) == ["blocks", "index"]
        assert file.get_tensor("index").tolist() == [[0, 0, 0, BLOCK_BYTES], [0, 1, 0, BLOCK_BYTES]]
        assert file.metadata()["format"] == "lagoon-delta"


@pytest.mark.parametrize(
    "other",
    [
        {"v": np.ones((2, 3), np.float32)},
        {"w": np.ones((3, 2), np.float32)},
        {"w": np.ones((2, 3), np.int32)},
        {"w": np.ones((2, 3), np.float32), "v": np.ones(1, np.float32)},
        {},
    ],
)
def test_other_tensors_shapes_or_dtypes_have_no_delta(tmp_path: Path, other: dict[str, np.ndarray]) -> None:
    save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "a")
    save_file(other, tmp_path / "b")
    assert not diff(tmp_path / "a", tmp_path / "b", tmp_path / "d", NO_LIMIT)


def test_a_delta_that_would_be_too_large_is_given_up(tmp_path: Path) -> None:
    save_file({"w": blocks(4)}, tmp_path / "a")
    save_file({"w": blocks(4, seed=1)}, tmp_path / "b")
    assert diff(tmp_path / "a", tmp_path / "b", tmp_path / "d", 4 * BLOCK_BYTES)
    assert not diff(tmp_path / "a", tmp_path / "b", tmp_path / "d", 4 * BLOCK_BYTES - 1)


def forge(path: Path, index: list[list[int]], body: bytes) -> Path:
    return write(
        path,
        {
            "blocks": ("U8", (len(body),), body),
            "index": ("I32", (len(index), 4), np.array(index, "<i4").tobytes()),
        },
    )


SPARSE_BOMB = (2**31).to_bytes(4, "little") + b"x" * 20


@pytest.mark.parametrize(
    ("index", "body"),
    [
        ([[1, 0, 0, 24]], b"x" * 24),  # no such tensor
        ([[0, 1, 0, 24]], b"x" * 24),  # no such block
        ([[-1, 0, 0, 24]], b"x" * 24),
        ([[0, 0, 3, 24]], b"x" * 24),  # no such encoding
        ([[0, 0, 0, 24]], b"x" * 25),  # a byte that nobody claims
        ([[0, 0, 0, 23]], b"x" * 23),  # shorter than its block
        ([[0, 0, 0, 24], [0, 0, 0, 24]], b"x" * 48),  # twice
        ([[0, 0, 1, 24]], b"x" * 24),  # not zstd
        ([[0, 0, 2, 24]], SPARSE_BOMB),  # more values than the block holds
    ],
)
def test_a_malformed_delta_is_refused(tmp_path: Path, index: list[list[int]], body: bytes) -> None:
    save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "a")
    with pytest.raises(WeightStoreError, match="malformed"):
        patch(tmp_path / "a", forge(tmp_path / "d", index, body))


def test_weights_are_no_delta(tmp_path: Path) -> None:
    save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "a")
    with pytest.raises(WeightStoreError, match="is not a delta"):
        patch(tmp_path / "a", tmp_path / "a")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_delta_with_any_bytes_altered_is_refused_or_applied_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder, rng = tmp_path_factory.mktemp("h"), np.random.default_rng(seed)
    old = rng.standard_normal((40, 1000)).astype(np.float32)
    save_file({"w": old}, folder / "a")
    save_file({"w": np.where(rng.random(old.shape) < rng.choice([0.001, 1]), old + 1e-3, old)}, folder / "b")
    assert diff(folder / "a", folder / "b", folder / "d", NO_LIMIT)
    content, size = bytearray((folder / "d").read_bytes()), (folder / "a").stat().st_size
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(*((0, 400), (HEADER_BYTES, len(content)))[int(rng.integers(2))]))
        content[place] = rng.integers(0, 256)
    (folder / "d").write_bytes(content)
    with suppress(WeightStoreError):
        patch(folder / "a", folder / "d")
    assert (folder / "a").stat().st_size == size
