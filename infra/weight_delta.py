"""Differences between two safetensors files of one layout: lossless, block by block, without a tensor library.

A delta is itself a safetensors file: tensor `blocks` (U8) holds what changed, tensor `index` (I32 [n, 4]) says where:
(number of the tensor, block in it, encoding, bytes in `blocks`), ascending. Tensors are numbered by their place in the
file and cut into blocks of 64 KiB; blocks that did not change are left out. The header is padded to a fixed length, so
that the file is written as it comes. Both files are read block by block, never as a whole.
"""

import json
import os
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from infra.fingerprints import TensorSpan, read_header
from infra.store import sync_path
from schemas.errors import WeightStoreError

BLOCK_BYTES = 64 * 1024
HEADER_BYTES = 1024
"""Of a delta, before its first block: length and padded JSON."""
INDEX_BYTES = 16
"""Of a delta, for each block in it."""

RAW, DENSE, SPARSE = range(3)
"""Encodings: the new bytes; XOR with the old, its bytes by significance, zstd; places and XOR of what changed, zstd."""

_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_ZSTD = pa.Codec("zstd", compression_level=1)
Bytes = NDArray[np.uint8]


def diff(base: Path, new: Path, into: Path, most_bytes: int) -> bool:
    """Write to `into` what makes `new` out of `base`.

    Returns:
        False, with `into` of no use, where the files hold other tensors, dtypes or shapes or in another order, or where
        the blocks would take more than `most_bytes`.

    Raises:
        WeightStoreError: one of them is not a safetensors file.
    """
    spans = _layout(new)
    if spans is None or _header(base) != _header(new) or base.stat().st_size != new.stat().st_size:
        return False
    index: list[tuple[int, int, int, int]] = []
    num_bytes = 0
    old, now = _bytes(base), _bytes(new)
    with into.open("wb") as out, ThreadPoolExecutor(os.cpu_count()) as pool:
        out.write(bytes(HEADER_BYTES))
        for number, span in enumerate(spans):
            width, places = _width(span), _changed(span, old, now)

            def encode(place: slice, width: int = width) -> tuple[int, bytes]:
                return _encode(old[place], now[place], width)

            for place, (encoding, body) in zip(places, pool.map(encode, places), strict=True):
                num_bytes += len(body)
                if num_bytes > most_bytes:
                    return False
                out.write(body)
                index.append((number, (place.start - span.start) // BLOCK_BYTES, encoding, len(body)))
        _finish(out, np.array(index, "<i4").reshape(-1, 4), num_bytes)
    return True


def patch(path: Path, delta: Path) -> None:
    """Turn the file at `path`, a copy of the base of `delta`, into what `delta` was made from, in place.

    Nothing is known of the result: whoever calls proves it.

    Raises:
        WeightStoreError: `delta` is malformed, or does not fit `path`.
    """
    spans = _layout(path)
    if spans is None:
        raise WeightStoreError(f"{path.name} has gaps between its tensors; a delta cannot be applied to it")
    with path.open("r+b") as file:
        for span, block, encoding, body in _blocks(delta, spans):
            start = span.start + block * BLOCK_BYTES
            file.seek(start)
            old = np.frombuffer(file.read(min(BLOCK_BYTES, span.end - start)), np.uint8)
            new = _decode(old, encoding, body, _width(span), delta.name)
            file.seek(start)
            file.write(new.tobytes())
    sync_path(path)


def _finish(out: BinaryIO, index: NDArray[np.int32], num_bytes: int) -> None:
    out.write(index.tobytes())
    header = {
        "__metadata__": {"format": "lagoon-delta", "block_bytes": str(BLOCK_BYTES)},
        "blocks": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]},
        "index": {"dtype": "I32", "shape": [*index.shape], "data_offsets": [num_bytes, num_bytes + index.nbytes]},
    }
    out.seek(0)
    length = HEADER_BYTES - 8
    out.write(length.to_bytes(8, "little") + json.dumps(header).encode().ljust(length))


def _blocks(delta: Path, spans: list[TensorSpan]) -> Generator[tuple[TensorSpan, int, int, memoryview]]:
    """Tensor, block in it, encoding and body of each block, once all of the index has been checked."""
    found = {span.name: span for span in read_header(delta)}
    if {name: span.dtype for name, span in found.items()} != {"blocks": "U8", "index": "I32"}:
        raise WeightStoreError(f"{delta.name} is not a delta: it holds {sorted(found)[:4]}, expected blocks and index")
    place, data, content = found["index"], found["blocks"], _bytes(delta)
    if (place.end - place.start) % INDEX_BYTES:
        raise WeightStoreError(f"{delta.name} is malformed: index of {place.end - place.start} bytes")
    index = np.frombuffer(content[place.start : place.end].tobytes(), "<i4").reshape(-1, 4).astype(np.int64)
    sizes = np.array([span.end - span.start for span in spans], np.int64)
    _check(index, sizes, data.end - data.start, delta.name)
    ends = data.start + np.cumsum(index[:, 3])
    for (tensor, block, encoding, num_bytes), end in zip(index.tolist(), ends.tolist(), strict=True):
        yield spans[tensor], block, encoding, content[end - num_bytes : end].data


def _check(index: NDArray[np.int64], sizes: NDArray[np.int64], num_bytes: int, name: str) -> None:
    tensors, blocks, encodings, lengths = index.T
    sound = bool(((index >= 0).all(axis=1) & (encodings <= SPARSE) & (tensors < len(sizes))).all())
    sound = sound and bool((blocks * BLOCK_BYTES < sizes[tensors]).all()) and int(lengths.sum()) == num_bytes
    if not sound or not (np.diff(tensors * 2**31 + blocks) > 0).all():
        raise WeightStoreError(f"{name} is malformed or of another base: its index names blocks that do not exist")


def _encode(old: Bytes, new: Bytes, width: int) -> tuple[int, bytes]:
    """The shortest encoding of `new`. Few changes are best named one by one, many best left in place."""
    xor = old ^ new
    words = xor.view(f"<u{width}")
    places = np.flatnonzero(words)
    found = [(RAW, new.tobytes())]
    if 16 * len(places) > len(words):
        found.append((DENSE, _zip(_planes(xor, width))))
    if 4 * len(places) < len(words):
        gaps = np.diff(places, prepend=0).astype("<u2")
        body = _planes(gaps.view(np.uint8), 2) + _planes(words[places].view(np.uint8), width)
        found.append((SPARSE, len(places).to_bytes(4, "little") + _zip(body)))
    return min(found, key=lambda each: len(each[1]))


def _decode(old: Bytes, encoding: int, body: memoryview, width: int, name: str) -> Bytes:
    count = int.from_bytes(body[:4], "little") if encoding == SPARSE else len(old) // width
    try:
        if encoding == RAW:
            return np.frombuffer(body, np.uint8, len(old)) if len(body) == len(old) else _fail(len(body))
        if encoding == DENSE:
            return old ^ _whole(_unzip(body, len(old)), width)
        if count > len(old) // width:
            return _fail(count)
        plain = _unzip(body[4:], count * (2 + width))
        places = np.cumsum(_whole(plain[: 2 * count], 2).view("<u2"), dtype=np.int64)
        new = old.copy()
        words = new.view(f"<u{width}")
        words[places] ^= _whole(plain[2 * count :], width).view(f"<u{width}")
    except (OSError, ValueError, IndexError, pa.ArrowException) as error:
        raise WeightStoreError(f"{name} is malformed or of another base: {error}") from error
    return new


def _fail(observed: int) -> Bytes:
    raise ValueError(f"a block of {observed} bytes or values does not fit its tensor")


def _planes(array: Bytes, width: int) -> bytes:
    """Bytes of equal significance side by side: exponents, which hardly ever change, apart from noise."""
    return array.reshape(-1, width).T.tobytes()


def _whole(planes: Bytes, width: int) -> Bytes:
    return np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1)


def _zip(plain: bytes) -> bytes:
    return _ZSTD.compress(plain, asbytes=True)


def _unzip(body: memoryview, num_bytes: int) -> Bytes:
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(_ZSTD.decompress(body, decompressed_size=num_bytes), np.uint8)


def _changed(span: TensorSpan, old: Bytes, new: Bytes) -> list[slice]:
    """Places of the blocks of `span` that are not equal."""
    edges = range(span.start, span.end, BLOCK_BYTES)
    places: Iterable[slice] = (slice(start, min(start + BLOCK_BYTES, span.end)) for start in edges)
    return [place for place in places if not np.array_equal(old[place], new[place])]


def _layout(path: Path) -> list[TensorSpan] | None:
    """The tensors by their place in the file; None unless they fill it without a gap."""
    spans = sorted(read_header(path), key=lambda span: (span.start, span.end))
    starts, ends = [span.start for span in spans], [len(_header(path)), *(span.end for span in spans)]
    return spans if [*starts, path.stat().st_size] == ends else None


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        start = file.read(8)
        return start + file.read(int.from_bytes(start, "little"))


def _width(span: TensorSpan) -> int:
    width = _WIDTHS.get(span.dtype, 1)
    return width if (span.end - span.start) % width == 0 else 1


def _bytes(path: Path) -> Bytes:
    """The content of a file as an array that lies on disk."""
    return np.asarray(np.memmap(path, np.uint8, "r"))
