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
DELTA, ADAPTERS = ".delta.safetensors", ".adapters.safetensors"
"""In place of `.safetensors`: what makes that file of a version out of its parent's, or out of its base's."""
MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""A longer `config.json`, `tokenizer_config.json` and the like is refused."""

_ON = {"delta": "a delta on", "adapters": "adapters of"}
_NAMES_CODE = frozenset({"auto_map", "trust_remote_code", "custom_pipelines"})
"""Keys by which a Hugging Face configuration names Python code that comes with the weights."""

_ALLOWED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(safetensors|json|txt|jinja)|tokenizer\.model")


def describe(folder: Path) -> tuple[File, ...]:
    """Size and SHA-256 of the files of a weight folder, sorted by name; hidden files and MANIFEST.json are left out.

    Raises:
        WeightStoreError: a file that a version may not hold (a pickle, a script, a link, a folder).
    """
    names = sorted(p.name for p in folder.iterdir() if p.name != MANIFEST and not p.name.startswith("."))
    return tuple(describe_file(folder / _checked(name, str(folder))) for name in names)


def verify(folder: Path, manifest: Manifest, where: str) -> None:
    """Prove that `folder` holds the materialised version: sizes, SHA-256 of each file, tensor fingerprint.

    Args:
        folder: files of the version; others beside them are not looked at.
        manifest: what is expected.
        where: the store that the files come from or go to, for the message.

    Raises:
        WeightStoreError: a listed file is missing, altered or not allowed, a configuration is malformed or names code,
            or the fingerprint differs.
    """
    check_listed(manifest, where)
    for file in manifest.contents:
        prove(folder / file.name, file, manifest.version, where)
        if file.name.endswith("config.json"):
            _refuse_code(folder / file.name)
        elif file.name.endswith(".json"):
            _refuse_binary(folder / file.name)
    found = fingerprint_files(folder / f.name for f in manifest.contents if f.name.endswith(".safetensors"))
    if found != manifest.fingerprint:
        raise WeightStoreError(
            f"version {manifest.version} from {where} has fingerprint {found}; the manifest says {manifest.fingerprint}"
        )


def prove(path: Path, file: File, version: int, where: str) -> None:
    """Prove one file by size and SHA-256.

    Raises:
        WeightStoreError: it is missing, a link, or not what `file` of the manifest of `version` says.
    """
    found = describe_file(path)
    if (found.num_bytes, found.sha256) != (file.num_bytes, file.sha256):
        raise WeightStoreError(
            f"version {version}, file {file.name} from {where}: {found.num_bytes} bytes, SHA-256 {found.sha256[:12]}; "
            f"the manifest says {file.num_bytes} bytes, {file.sha256[:12]}"
        )


def holds(folder: Path, manifest: Manifest) -> bool:
    """Whether `folder` holds every file of the materialised version, byte for byte."""
    try:
        for file in manifest.contents:
            prove(folder / file.name, file, manifest.version, str(folder))
    except WeightStoreError:
        return False
    return True


def check_listed(manifest: Manifest, where: str) -> None:
    """Refuse a manifest by what it lists, before a byte of it is fetched.

    Raises:
        WeightStoreError: without plain weights, with a file that is not allowed or listed twice, or a delta or adapters
            that say not on what they build or bring files that are no part of the whole.
    """
    what = f"version {manifest.version} in {where}"
    whole = {file.name for file in manifest.contents}
    if not any(n.endswith(".safetensors") for n in whole) or any(n.endswith((DELTA, ADAPTERS)) for n in whole):
        raise WeightStoreError(
            f"{what} is of kind {manifest.kind} with files {sorted(whole)}; expected at least one safetensors file, "
            "and no delta or adapters among them"
        )
    for names in ([f.name for f in manifest.files], [f.name for f in manifest.whole]):
        for name, count in Counter(names).items():
            _checked(name, where)
            if count > 1:
                raise WeightStoreError(f"{what} lists {name} {count} times; expected once")
    if manifest.kind != "full" and not 0 < (manifest.builds_on or 0) < manifest.version:
        raise WeightStoreError(f"{what} is {_ON[manifest.kind]} version {manifest.builds_on}; expected an earlier one")
    if manifest.kind != "full" and (odd := [f.name for f in manifest.files if patched(f.name) not in whole]):
        raise WeightStoreError(f"{what} brings {odd}, which are no part of it: {sorted(whole)}")


def patched(name: str) -> str:
    """The file of the materialised version that the file `name` of a delta or of adapters makes."""
    suffix = next((each for each in (DELTA, ADAPTERS) if name.endswith(each)), "")
    return name.removesuffix(suffix) + ".safetensors" if suffix else name


def describe_file(path: Path) -> File:
    """Size and SHA-256 of one file.

    Raises:
        WeightStoreError: it is missing, a link or a folder.
    """
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
