"""The files of a weight version on this machine: which are allowed, described, proven against a manifest."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from infra.fingerprints import fingerprint_files
from schemas.errors import WeightStoreError
from schemas.messages import File, Manifest

MANIFEST = "MANIFEST.json"
MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""A longer `config.json`, `tokenizer_config.json` and the like is refused."""

_NAMES_CODE = frozenset({"auto_map", "trust_remote_code", "custom_pipelines"})
"""Keys by which a Hugging Face configuration names Python code that comes with the weights."""

_ALLOWED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(safetensors|json|txt|jinja)|tokenizer\.model")


def describe(folder: Path) -> tuple[File, ...]:
    """Size and SHA-256 of the files of a weight folder, sorted by name; hidden files and MANIFEST.json are left out.

    Raises:
        WeightStoreError: a file that a version may not hold (a pickle, a script, a link, a folder).
    """
    names = sorted(p.name for p in folder.iterdir() if p.name != MANIFEST and not p.name.startswith("."))
    return tuple(_describe(folder / _checked(name, str(folder))) for name in names)


def verify(folder: Path, manifest: Manifest, where: str) -> None:
    """Prove that `folder` holds what `manifest` says: sizes, SHA-256 of each file, tensor fingerprint.

    Args:
        folder: files of the version; others beside them are not looked at.
        manifest: what is expected.
        where: the store that the files come from or go to, for the message.

    Raises:
        WeightStoreError: a listed file is missing, altered or not allowed, a configuration is malformed or names code,
            or the fingerprint differs.
    """
    check_listed(manifest, where)
    for file in manifest.files:
        found = _describe(folder / file.name)
        if found != file:
            raise WeightStoreError(
                f"version {manifest.version}, file {file.name} from {where}: {found.num_bytes} bytes, SHA-256 "
                f"{found.sha256[:12]}; the manifest says {file.num_bytes} bytes, {file.sha256[:12]}"
            )
        if file.name.endswith("config.json"):
            _refuse_code(folder / file.name)
        elif file.name.endswith(".json"):
            _refuse_binary(folder / file.name)
    found = fingerprint_files(folder / f.name for f in manifest.files if f.name.endswith(".safetensors"))
    if found != manifest.fingerprint:
        raise WeightStoreError(
            f"version {manifest.version} from {where} has fingerprint {found}; the manifest says {manifest.fingerprint}"
        )


def check_listed(manifest: Manifest, where: str) -> None:
    """Refuse a manifest by what it lists, before a byte of it is fetched.

    Raises:
        WeightStoreError: not a full version of plain weights, a file that is not allowed, or one that is listed twice.
    """
    if manifest.kind != "full" or not any(f.name.endswith(".safetensors") for f in manifest.files):
        raise WeightStoreError(
            f"version {manifest.version} in {where} is of kind {manifest.kind} with files "
            f"{[f.name for f in manifest.files]}; expected a full version with at least one safetensors file"
        )
    for name, count in Counter(f.name for f in manifest.files).items():
        _checked(name, where)
        if count > 1:
            raise WeightStoreError(f"version {manifest.version} in {where} lists {name} {count} times; expected once")


def _describe(path: Path) -> File:
    if path.is_symlink() or not path.is_file():
        raise WeightStoreError(f"{path} is missing or not a plain file")
    with path.open("rb") as file:
        return File(
            name=path.name, num_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
        )


def _refuse_code(path: Path) -> None:
    """Refuse a configuration that asks for code: whatever loads the folder later, none of it runs."""
    size = path.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise WeightStoreError(f"{path} has {size} bytes; expected at most {MAX_CONFIG_BYTES}")
    try:
        json.loads(path.read_bytes(), object_hook=_Checked)
    except (ValueError, RecursionError) as error:
        raise WeightStoreError(f"{path} is not a configuration to be loaded: {error}") from error


def _refuse_binary(path: Path) -> None:
    """Refuse what is no JSON by its first byte: a pickle under another name."""
    with path.open("rb") as file:
        start = file.read(64).lstrip()[:1]
    if start not in (b"{", b"["):
        raise WeightStoreError(f"{path} begins with {start!r}; expected JSON, never pickles or code")


class _Checked(dict[str, Any]):
    """A JSON object that names no code."""

    def __init__(self, value: dict[str, Any]) -> None:
        if found := sorted(_NAMES_CODE & value.keys()):
            raise ValueError(f"{found} name code to run, which no weight version may bring")
        super().__init__(value)


def _checked(name: str, where: str) -> str:
    if not _ALLOWED.fullmatch(name) or name == MANIFEST:
        raise WeightStoreError(
            f"{name!r} in {where} may not be part of a weight version; allowed are *.safetensors, *.json, *.txt, "
            "*.jinja and tokenizer.model, never pickles or code"
        )
    return name
