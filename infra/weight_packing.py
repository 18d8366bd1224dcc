"""What of a weight version goes into the store: all of it, a delta against the version before, or adapters."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.weight_adapters import makes
from infra.weight_delta import diff
from infra.weight_files import DELTA, describe_file, holds, patched
from schemas.messages import Manifest


@dataclass(frozen=True, slots=True)
class Base:
    """The version before: a folder that holds it, its manifest, and the bytes of all deltas since its full one."""

    folder: Path
    manifest: Manifest
    chain_bytes: int


@dataclass(frozen=True, slots=True)
class Adapters:
    """A file of adapters, and the full version that they are merged into: a folder that holds it, and its manifest."""

    file: Path
    base: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Pack:
    """A manifest as it is stored, and where the files are that it lists."""

    manifest: Manifest
    folders: dict[str, Path]


@contextmanager
def packed(folder: Path, manifest: Manifest, adapters: Adapters | None, base: Base | None) -> Generator[Pack]:
    """The pack of the full version in `folder`: `adapters` or a delta on `base`, where that pays, else all of it.

    Either pays up to half the bytes of the whole, and deltas while all since the last full version take no more than
    the whole: so no reader ever fetches more than twice the whole.
    """
    if adapters is not None and (pack := _adapters(folder, manifest, adapters)):
        yield pack
        return
    if base is None:
        yield _full(folder, manifest)
        return
    with tempfile.TemporaryDirectory(prefix=".delta-", dir=folder.parent) as scratch:
        yield _delta(folder, manifest, base, Path(scratch)) or _full(folder, manifest)


def _full(folder: Path, manifest: Manifest) -> Pack:
    return Pack(manifest, dict.fromkeys((file.name for file in manifest.files), folder))


def _delta(folder: Path, manifest: Manifest, base: Base, scratch: Path) -> Pack | None:
    most_bytes = min(manifest.num_bytes // 2, manifest.num_bytes - base.chain_bytes)
    changed = [file for file in manifest.files if file not in base.manifest.contents]
    weights = [file for file in changed if file.name.endswith(".safetensors")]
    if _shards(base.manifest) != _shards(manifest) or not holds(base.folder, base.manifest):
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


def _adapters(folder: Path, manifest: Manifest, adapters: Adapters) -> Pack | None:
    name = patched(adapters.file.name)
    if not _shards(adapters.manifest) == _shards(manifest) == {name}:
        return None
    if not makes(adapters.base / name, adapters.file, folder / name):
        return None
    changed = [file for file in manifest.files if file.name != name and file not in adapters.manifest.contents]
    files = (describe_file(adapters.file), *changed)
    changes = {"kind": "adapters", "base": adapters.manifest.version, "files": files, "whole": manifest.files}
    made = manifest.model_copy(update=changes)
    if made.num_bytes > manifest.num_bytes // 2:
        return None
    return Pack(made, {file.name: folder for file in changed} | {adapters.file.name: adapters.file.parent})


def _shards(manifest: Manifest) -> set[str]:
    return {file.name for file in manifest.contents if file.name.endswith(".safetensors")}
