"""What of a weight version goes into the store: all of it, or a delta against the version before."""

import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.weight_delta import diff
from infra.weight_files import DELTA, describe_file, holds
from schemas.messages import Manifest


@dataclass(frozen=True, slots=True)
class Base:
    """The version before: a folder that holds it, its manifest, and the bytes of all deltas since its full one."""

    folder: Path
    manifest: Manifest
    chain_bytes: int


@dataclass(frozen=True, slots=True)
class Pack:
    """A manifest as it is stored, and where the files are that it lists."""

    manifest: Manifest
    folders: dict[str, Path]


@contextmanager
def packed(folder: Path, manifest: Manifest, base: Base | None) -> Generator[Pack]:
    """The pack of the full version in `folder`: a delta where `base` allows for one that pays, else all of it.

    A delta pays up to half the bytes of the whole, and while all since the last full version take no more than the
    whole: so no reader ever fetches more than twice the whole.
    """
    if base is None:
        yield _full(folder, manifest)
        return
    with tempfile.TemporaryDirectory(prefix=".delta-", dir=folder.parent) as scratch:
        yield _delta(folder, manifest, base, Path(scratch)) or _full(folder, manifest)


def _full(folder: Path, manifest: Manifest) -> Pack:
    return Pack(manifest, dict.fromkeys((file.name for file in manifest.files), folder))


def _delta(folder: Path, manifest: Manifest, base: Base, scratch: Path) -> Pack | None:
    most_bytes = min(manifest.num_bytes // 2, manifest.num_bytes - base.chain_bytes)
    before = {file.name: file for file in base.manifest.contents}
    changed = [file for file in manifest.files if before.get(file.name) != file]
    weights = [file for file in changed if file.name.endswith(".safetensors")]
    if _shards(before) != _shards(file.name for file in manifest.files) or not holds(base.folder, base.manifest):
        return None
    files = {file: folder for file in changed if file not in weights}
    for file in weights:
        into = scratch / f"{file.name.removesuffix('.safetensors')}{DELTA}"
        if not diff(base.folder / file.name, folder / file.name, into, most_bytes):
            return None
        files[describe_file(into)] = scratch
    made = manifest.model_copy(update={"kind": "delta", "files": tuple(files), "whole": manifest.files})
    if made.num_bytes > most_bytes:
        return None
    return Pack(made, {file.name: place for file, place in files.items()})


def _shards(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.endswith(".safetensors")}
