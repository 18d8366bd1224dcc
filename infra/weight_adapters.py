"""Adapters as a weight version: small factors, which make it out of a full version bit for bit wherever that is done.

An adapters file is a safetensors file: `<layer>.lora_A` [rank, in] and `<layer>.lora_B` [out, rank] for each
`<layer>.weight` [out, in] that they change, and `scale` F32 []. Learner and readers call `merged`, and nothing else.
"""

import os
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.fingerprints import TensorSpan, read_header
from infra.store import sync_path
from schemas.errors import WeightStoreError

DOWN, UP, SCALE = "lora_A", "lora_B", "scale"
_BLOCK_VALUES = 32 * 1024
_KINDS = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2")}
Values = NDArray[Any]
"""float32, or uint16: the bits of bfloat16, which numpy lacks."""


def merged(weight: Values, down: Values, up: Values, scale: float) -> Values:
    """W + scale (b1 a1 + b2 a2 + ...) in float32, rounded to what `weight` is of; `weight` itself where all b are 0.

    The same bits on any machine, by any number of threads: each value is made by single products and sums of float32 in
    the order written. A matrix product would sum in an order of its library's choice.

    Args:
        weight: W [out, in].
        down: the rows a [rank, in].
        up: the columns b [out, rank].
        scale: rounded to float32.
    """
    if not up.any():
        return weight
    a, b, result = _widened(down), _widened(up), np.empty_like(weight)
    rows = max(1, _BLOCK_VALUES // weight.shape[1])  # what is summed stays in a processor's cache

    def fill(start: int) -> None:
        place = slice(start, start + rows)
        total = np.multiply.outer(b[place, 0], a[0])
        term = np.empty_like(total)
        for number in range(1, len(a)):
            total += np.multiply.outer(b[place, number], a[number], out=term)
        total *= np.float32(scale)
        total += _widened(weight[place])
        result[place] = total if result.dtype == total.dtype else _bfloat16(total)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(0, len(weight), rows)))
    return result


def add(path: Path, adapters: Path) -> None:
    """Merge the file `adapters` into the weights at `path`, a copy of their base, in place.

    Nothing is known of the result: whoever calls proves it.

    Raises:
        WeightStoreError: `adapters` is malformed, or does not fit `path`.
    """
    with path.open("r+b") as file:
        for span, values in _changes(path, adapters):
            file.seek(span.start)
            file.write(values.data)  # no copy, which would hold the interpreter up
    sync_path(path)


def makes(base: Path, adapters: Path, new: Path) -> bool:
    """Whether `adapters`, merged into the weights `base`, give the file `new`, byte for byte.

    Raises:
        WeightStoreError: `adapters` is malformed, or does not fit `base`.
    """
    old, now = (np.memmap(path, np.uint8, "r") for path in (base, new))
    if len(old) != len(now):
        return False
    done = 0
    for span, values in _changes(base, adapters):
        made = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if not np.array_equal(old[done : span.start], now[done : span.start]):
            return False
        if not np.array_equal(made, now[span.start : span.end]):
            return False
        done = span.end
    return np.array_equal(old[done:], now[done:])


def _changes(path: Path, adapters: Path) -> Generator[tuple[TensorSpan, Values]]:
    """Where each changed tensor of `path` lies, ascending, and its new values; one at a time."""
    weights = {span.name: span for span in read_header(path)}
    parts = {span.name: span for span in read_header(adapters)}
    layers = {name.removesuffix(f".{DOWN}") for name in parts if name.endswith(f".{DOWN}")}
    _check_names(layers, parts, weights, adapters.name)
    scale = _values(parts[SCALE])
    if scale.shape or scale.dtype != np.float32:
        raise WeightStoreError(f"{adapters.name}: {SCALE} is {parts[SCALE].dtype} {scale.shape}; expected one F32")
    for layer in sorted(layers, key=lambda layer: weights[f"{layer}.weight"].start):
        span = weights[f"{layer}.weight"]
        weight, down, up = (_values(each) for each in (span, parts[f"{layer}.{DOWN}"], parts[f"{layer}.{UP}"]))
        if not down.ndim == up.ndim == 2 or not 0 < len(down) == up.shape[1] or weight.shape != (len(up), len(down.T)):
            raise WeightStoreError(
                f"{adapters.name}: {layer} has {DOWN} {down.shape} and {UP} {up.shape}, which make no {weight.shape}"
            )
        yield span, merged(weight, down, up, float(scale))


def _check_names(layers: set[str], parts: Iterable[str], weights: Iterable[str], name: str) -> None:
    expected = {SCALE, *(f"{layer}.{part}" for layer in layers for part in (DOWN, UP))}
    if odd := sorted(expected ^ {*parts}):
        raise WeightStoreError(f"{name} is not a file of adapters: {odd[:4]} are missing or too many")
    if odd := sorted({f"{layer}.weight" for layer in layers} - {*weights}):
        raise WeightStoreError(f"{name} changes {odd[:4]}, which its base lacks")


def _values(span: TensorSpan) -> Values:
    """A tensor as it lies on disk."""
    kind, data = _KINDS.get(span.dtype), np.memmap(span.path, np.uint8, "r")[span.start : span.end]
    try:
        if kind is None:
            raise ValueError(f"adapters are made of {sorted(_KINDS)}")
        return np.asarray(data).view(kind).reshape(span.shape)
    except ValueError as error:
        raise WeightStoreError(f"{span.path.name}: {span.name} is {span.dtype} {span.shape}: {error}") from error


def _widened(values: Values) -> NDArray[np.float32]:
    return values if values.dtype == np.float32 else (values.astype(np.uint32) << 16).view(np.float32)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, of two equally near the even one."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
