"""Which run manifest a run goes on from: the newest one of which everything is there."""

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.lake import Lake
from infra.run_manifests import RunManifests, checkpoint_digest, faults
from infra.weights import MANIFEST, WeightStore
from schemas.errors import LakeError, WeightStoreError
from schemas.run_manifest import RunManifest
from schemas.settings import Settings

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Choice:
    """A manifest of which everything is there; `passed_over` says why no newer one was taken."""

    manifest: RunManifest
    passed_over: tuple[str, ...]


def choose(settings: Settings) -> Choice:
    """The newest manifest whose checkpoint, weights and tables are there and prove to be what it says.

    Raises:
        LakeError: there is none; names what each one lacks.
    """
    manifests = RunManifests(Lake.of(settings))
    refused: list[str] = []
    for manifest in manifests.newest_first(refused):
        missing = missing_of(settings, manifest)
        if not missing:
            return Choice(manifest, tuple(refused))
        refused.append(f"run manifest {manifest.sequence}, step {manifest.train_step}: {'; '.join(missing)}")
    reasons = "\n".join(f"- {reason}" for reason in refused) or "- there is none"
    raise LakeError(
        f"no run manifest in {manifests.uri} can be gone on from:\n{reasons}\nRestore what is missing from a backup, "
        "or begin a new run with the newest weights: --policy.path=<a weight version's folder>"
    )


def missing_of(settings: Settings, manifest: RunManifest) -> list[str]:
    """What of `manifest` is not there, or not what it says, in words."""
    weights = WeightStore.of(settings)
    found = faults(manifest, Lake.of(settings), weights)
    found += checkpoint_faults(settings.checkpoints / manifest.checkpoint, manifest.checkpoint_sha256)
    return found or _unproven(weights, manifest.weight_version)


def checkpoint_faults(folder: Path, digest: str | None = None) -> list[str]:
    """What is wrong with a checkpoint, every byte of it read; `digest` is what its manifest must have, if known."""
    found = checkpoint_digest(folder)
    if not found:
        return [f"checkpoint {folder} is not there, or not complete"]
    if digest is not None and found != digest:
        return [f"checkpoint {folder} has a manifest with SHA-256 {found[:12]}, expected {digest[:12]}"]
    try:
        files: list[dict[str, Any]] = json.loads((folder / MANIFEST).read_bytes())["files"]
        return [
            f"checkpoint file {folder / f['path']} is altered or cut off" for f in files if not _is_whole(folder, f)
        ]
    except (ValueError, KeyError, TypeError) as error:
        return [f"{folder / MANIFEST} is damaged: {error}"]


def _is_whole(folder: Path, file: dict[str, Any]) -> bool:
    path = folder / file["path"]
    if not path.is_file() or path.stat().st_size != file["num_bytes"]:
        return False
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == file["sha256"]


def _unproven(weights: WeightStore, version: int) -> list[str]:
    """Download a version and prove it, as a service does before it serves it."""
    with tempfile.TemporaryDirectory(prefix="lagoon-resume-") as scratch:
        try:
            weights.fetch(version, Path(scratch))
        except WeightStoreError as error:
            return [str(error)]
    return []
