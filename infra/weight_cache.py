"""Fetched weight versions on this machine: made of what is there already and the least that must come from the store.

<into>/v00000044/    a version: a Hugging Face folder, proven, and its manifest
<into>/.v00000044.part/    what has come of a version so far; a try that failed is taken up again where it ended
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from prometheus_client import Summary

from infra.locks import taken
from infra.weight_adapters import add
from infra.weight_delta import patch
from infra.weight_files import ADAPTERS, MANIFEST, check_listed, holds, patched, verify
from schemas.errors import ContractError, WeightStoreError
from schemas.messages import File, Manifest, decode

MAX_CHAIN = 128
"""Deltas to the nearest full version; a longer chain is refused."""
APPLIED = Summary("lagoon_weight_apply_seconds", "Seconds to make and prove a version from what was fetched", ["kind"])


class Source(Protocol):
    """What is read of a weight store."""

    uri: str

    def manifest(self, version: int) -> Manifest: ...
    def download(self, manifest: Manifest, file: File, into: Path) -> None: ...


def folder_name(version: int) -> str:
    """The folder of a version, in a store and in a cache."""
    return f"v{version:08d}"


def materialize(source: Source, version: int, into: Path) -> Path:
    """Put the whole of `version` into folder `into`, proven, and return its folder there.

    A folder that is there already is proven again and kept; one that fails is replaced. A delta is applied to the
    nearest version in `into` that is what its manifest says; without one, to the nearest full version. Adapters are
    merged into their base, which is put into `into` as well, and stays for those that follow.

    Raises:
        WeightStoreError: the version or one that it builds on is incomplete, or not what its manifest says. Nothing
            that was there before has changed.
    """
    manifest = source.manifest(version)
    check_listed(manifest, source.uri)
    target = into / folder_name(version)
    if target.exists():
        try:
            verify(target, manifest, str(into))
            return target
        except WeightStoreError:
            shutil.rmtree(target)
    with _workplace(target) as place:
        _make(source, manifest, place, target)
    _sweep(target)
    return target


def prune(into: Path, versions: Iterable[int]) -> None:
    """Remove all versions in `into` but `versions` and the bases of adapters among them."""
    kept = {into / folder_name(version) for version in versions}
    kept |= {into / folder_name(base) for folder in kept if (base := _base(folder))}
    for folder in {*into.glob("v*")} - kept:
        shutil.rmtree(folder, ignore_errors=True)


def _base(folder: Path) -> int | None:
    """The base of the adapters that made the version in `folder`; None where none did, or where nobody knows."""
    try:
        return decode(Manifest, (folder / MANIFEST).read_bytes()).base
    except (OSError, ContractError):  # at worst the base is fetched again
        return None


def _make(source: Source, manifest: Manifest, place: Path, target: Path) -> None:
    base, chain = _gather(source, manifest, place, target.parent)
    began, whole = time.monotonic(), place / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    if base is not None:
        for name in [file.name for file in manifest.contents if (base / file.name).exists()]:
            shutil.copyfile(base / name, whole / name)
    for step in chain:
        _apply(step, place, whole)
    for path in [p for p in whole.iterdir() if p.name not in {file.name for file in manifest.contents}]:
        path.unlink()
    verify(whole, manifest, source.uri)
    (whole / MANIFEST).write_bytes(manifest.to_bytes())
    APPLIED.labels(manifest.kind).observe(time.monotonic() - began)
    if not _move(whole, target):
        verify(target, manifest, str(target.parent))


def _gather(source: Source, manifest: Manifest, place: Path, into: Path) -> tuple[Path | None, list[Manifest]]:
    """Download what leads to `manifest`; the folder to start from, None for nothing, and the manifests from there on.

    That is the way of least bytes: going back, each version on it needs all that comes after it, a full one nothing of
    what came before, adapters only their base. The newest comes first: what is damaged there makes the rest
    superfluous.
    """
    chain = [manifest]
    while True:
        for file in chain[0].files:
            source.download(chain[0], file, _part(place, chain[0], file))
        if chain[0].kind == "full":
            return None, chain
        if chain[0].kind == "adapters":
            return _made_base(source, chain[0], into), chain
        if len(chain) > MAX_CHAIN:
            raise WeightStoreError(f"version {manifest.version} builds on more than {MAX_CHAIN} deltas; expected fewer")
        parent = source.manifest(chain[0].parent or 0)
        check_listed(parent, source.uri)
        if holds(held := into / folder_name(parent.version), parent):
            return held, chain
        chain.insert(0, parent)


def _made_base(source: Source, adapters: Manifest, into: Path) -> Path:
    """The folder in `into` of what `adapters` are merged into, proven."""
    base = adapters.base or 0
    if (kind := source.manifest(base).kind) != "full":
        raise WeightStoreError(
            f"version {adapters.version} is adapters of version {base}, a {kind}; expected a full one"
        )
    return materialize(source, base, into)


def _apply(step: Manifest, place: Path, whole: Path) -> None:
    """Bring `whole`, the version before, to `step`."""
    for file in step.files:
        path, part = whole / patched(file.name), _part(place, step, file)
        if path.name == file.name:
            part.replace(path)
        elif not path.exists():
            raise WeightStoreError(f"version {step.version} changes {path.name}, which version {step.builds_on} lacks")
        elif file.name.endswith(ADAPTERS):
            add(path, part)
        else:
            patch(path, part)


def _part(place: Path, step: Manifest, file: File) -> Path:
    folder = place / folder_name(step.version)
    folder.mkdir(exist_ok=True)
    return folder / file.name


@contextmanager
def _workplace(target: Path) -> Generator[Path]:
    """A folder that stays where the work in it fails; a passing one where another process holds that."""
    place = target.with_name(f".{target.name}.part")
    place.mkdir(parents=True, exist_ok=True)
    with _locked(place) as mine:
        if mine:
            yield place
            shutil.rmtree(place)
            return
        passing = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        passing.mkdir()
        try:
            yield passing
        finally:
            shutil.rmtree(passing, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove what came of earlier versions and was never finished."""
    for place in target.parent.glob(".v*.part"):
        if place.name < f".{target.name}":
            with _locked(place) as mine:
                if mine:
                    shutil.rmtree(place)


@contextmanager
def _locked(place: Path) -> Generator[bool]:
    """Whether folder `place` is this process's while inside; not if it is another's, or gone."""
    try:
        descriptor = os.open(place, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        mine = taken(descriptor) and place.exists() and os.path.samestat(os.fstat(descriptor), place.stat())
    except FileNotFoundError:
        mine = False
    try:
        yield mine
    finally:
        os.close(descriptor)


def _move(folder: Path, target: Path) -> bool:
    """Rename; False where another process of this machine has finished the same version first."""
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
            raise
        return False
    return True
