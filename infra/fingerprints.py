"""Fingerprints of weights: SHA-256 over the sorted (tensor name, dtype, shape, bytes), whatever file holds them.

Reads safetensors by their format (https://huggingface.co/docs/safetensors: header length, JSON header, data), so that
no tensor library is needed.
"""

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import WeightStoreError

_MAX_HEADER_BYTES = 16 * 1024 * 1024
"""Room for 100,000 tensors. As Python objects a header takes some ten times its bytes."""

_DTYPES = {
    "f2": "F16",
    "f4": "F32",
    "f8": "F64",
    "i1": "I8",
    "i2": "I16",
    "i4": "I32",
    "i8": "I64",
    "u1": "U8",
    "b1": "BOOL",
}


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where a tensor lies: bytes [start, end) of `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    end: int


def fingerprint(tensors: Mapping[str, np.ndarray]) -> str:
    """The fingerprint of arrays in memory; equal to that of a safetensors file that holds them.

    Raises:
        WeightStoreError: a dtype that numpy cannot name as safetensors do.
    """
    digest = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        dtype = _DTYPES.get(array.dtype.str[1:])
        if dtype is None:
            raise WeightStoreError(f"tensor {name} has dtype {array.dtype}; expected one of {sorted(_DTYPES.values())}")
        _begin(digest, name, dtype, array.shape)
        digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def fingerprint_file(path: Path) -> str:
    """The fingerprint of the tensors in one safetensors file."""
    return fingerprint_files([path])


def fingerprint_files(paths: Iterable[Path]) -> str:
    """The fingerprint of the tensors in several safetensors files (shards) taken together.

    Raises:
        WeightStoreError: a malformed file, or a tensor that two files hold.
    """
    spans = sorted((span for path in paths for span in read_header(path)), key=lambda span: span.name)
    digest = hashlib.sha256()
    for before, span in zip([None, *spans], spans, strict=False):
        if before is not None and before.name == span.name:
            raise WeightStoreError(f"tensor {span.name} is in {before.path.name} and in {span.path.name}")
        _begin(digest, span.name, span.dtype, span.shape)
        _update(digest, span)
    return digest.hexdigest()


def read_header(path: Path) -> list[TensorSpan]:
    """The tensors of a safetensors file.

    Raises:
        WeightStoreError: not a safetensors file, or data beyond its end.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise WeightStoreError(
                f"{path.name} is not a safetensors file: header of {length} bytes in a file of {size}"
            )
        raw = file.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        entries = [(n, e) for n, e in header.items() if n != "__metadata__"]
        spans = [_span(path, 8 + length, name, entry) for name, entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise WeightStoreError(f"{path.name} has a malformed safetensors header: {error}") from error
    if any(not 8 + length <= s.start <= s.end <= size for s in spans):
        raise WeightStoreError(f"{path.name} is cut off or malformed: tensors lie outside its {size} bytes")
    if sum(s.end - s.start for s in spans) > size:
        raise WeightStoreError(f"{path.name} is malformed: tensors overlap, more bytes than its {size}")
    return spans


def _span(path: Path, base: int, name: str, entry: Mapping[str, Any]) -> TensorSpan:
    start, end = entry["data_offsets"]
    return TensorSpan(
        name, str(entry["dtype"]), tuple(map(int, entry["shape"])), path, base + int(start), base + int(end)
    )


def _begin(digest: Any, name: str, dtype: str, shape: Sequence[int]) -> None:
    digest.update(json.dumps([name, dtype, list(shape)]).encode())


def _update(digest: Any, span: TensorSpan) -> None:
    if span.start == span.end:
        return
    with span.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        data = memoryview(view)
        digest.update(data[span.start : span.end])
        data.release()
