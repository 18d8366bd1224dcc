"""The files of a weight version on this machine: which are allowed, described, proven against a manifest."""

import hashlib
import re
from pathlib import Path

from infra.fingerprints import fingerprint_files
from schemas.errors import WeightStoreError
from schemas.messages import File, Manifest

MANIFEST = "MANIFEST.json"
_ALLOWED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(safetensors|json|txt|jinja)|tokenizer\.model")


def describe(folder: Path) -> tuple[File, ...]:
    """Size and SHA-256 of the files of a weight folder, sorted by name; hidden files and MANIFEST.json are left out.

    Raises:
        WeightStoreError: a file that a version may not hold (a pickle, a script, a link, a folder).
    """
    names = sorted(p.name for p in folder.iterdir() if p.name != MANIFEST and not p.name.startswith("."))
    return tuple(_describe(folder / _checked(name, folder)) for name in names)


def verify(folder: Path, manifest: Manifest, where: str) -> None:
    """Prove that `folder` holds what `manifest` says: sizes, SHA-256 of each file, tensor fingerprint.

    Args:
        folder: files of the version; others beside them are not looked at.
        manifest: what is expected.
        where: the store that the files come from or go to, for the message.

    Raises:
        WeightStoreError: a listed file is missing, altered or not allowed, or the fingerprint differs.
    """
    if manifest.kind != "full" or not any(f.name.endswith(".safetensors") for f in manifest.files):
        raise WeightStoreError(
            f"version {manifest.version} in {where} is of kind {manifest.kind} with files "
            f"{[f.name for f in manifest.files]}; expected a full version with at least one safetensors file"
        )
    for file in manifest.files:
        _checked(file.name, folder)
        found = _describe(folder / file.name)
        if found != file:
            raise WeightStoreError(
                f"version {manifest.version}, file {file.name} from {where}: {found.num_bytes} bytes, SHA-256 "
                f"{found.sha256[:12]}; the manifest says {file.num_bytes} bytes, {file.sha256[:12]}"
            )
    found = fingerprint_files(folder / f.name for f in manifest.files if f.name.endswith(".safetensors"))
    if found != manifest.fingerprint:
        raise WeightStoreError(
            f"version {manifest.version} from {where} has fingerprint {found}; the manifest says {manifest.fingerprint}"
        )


def _describe(path: Path) -> File:
    if path.is_symlink() or not path.is_file():
        raise WeightStoreError(f"{path} is missing or not a plain file")
    with path.open("rb") as file:
        return File(
            name=path.name, num_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
        )


def _checked(name: str, folder: Path) -> str:
    if not _ALLOWED.fullmatch(name) or name == MANIFEST:
        raise WeightStoreError(
            f"{name!r} in {folder} may not be part of a weight version; allowed are *.safetensors, *.json, *.txt, "
            "*.jinja and tokenizer.model, never pickles or code"
        )
    return name
