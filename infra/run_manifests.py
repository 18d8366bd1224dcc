"""The run manifests in the lake: `<lake>/_lagoon/run/00000042.json`, numbered, never rewritten, newest first.

A manifest is one object and created conditionally, so it is there whole or not at all; what was cut off or altered
later fails its own hash and is passed over by name.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow.compute as pc
from obstore.exceptions import AlreadyExistsError

from infra.lake import Lake
from infra.store import local_path, open_store, sync_path
from infra.weights import MANIFEST, WeightStore
from schemas.errors import ContractError, LakeError
from schemas.messages import decode
from schemas.run_manifest import RunManifest
from schemas.settings import Settings
from schemas.tables import TABLES

FOLDER = "_lagoon/run"
KEEP = 20
"""Newest manifests that stay. Those of checkpoints that are gone are of no use, and the learner keeps fewer."""

_SHAPING = {"loop", "dispatch", "curate", "rollout", "learner", "objective", "evaluator", "policy", "families"}
_NAME = re.compile(r"(\d{8})\.json")


class RunManifests:
    """The manifests of the run whose lake this is."""

    def __init__(self, lake: Lake):
        self._lake, self.uri = lake, f"{lake.uri}/{FOLDER}"
        self._folder = local_path(self.uri)
        self._store = open_store(self.uri, lake.storage_options)

    def sequences(self) -> list[int]:
        """Their numbers, newest first."""
        objects = self._lake.retry(f"listing the run manifests in {self.uri}", self._store.list_with_delimiter)[
            "objects"
        ]
        names = [str(item["path"]).rsplit("/", 1)[-1] for item in objects]
        return sorted((int(match[1]) for match in map(_NAME.fullmatch, names) if match), reverse=True)

    def _body(self, sequence: int) -> bytes | None:
        def attempt() -> bytes | None:
            try:
                return bytes(self._store.get(_name(sequence)).bytes())
            except FileNotFoundError:
                return None

        return self._lake.retry(f"reading run manifest {sequence} in {self.uri}", attempt)

    def _judged(self, sequence: int, body: bytes | None) -> RunManifest:
        where = f"run manifest {sequence} in {self.uri}"
        if body is None:
            raise LakeError(f"{where} is gone")
        try:
            manifest = decode(RunManifest, body)
        except ContractError as error:
            raise LakeError(f"{where} is damaged: {error}") from error
        if manifest.sequence != sequence or not manifest.is_intact:
            raise LakeError(f"{where} is damaged: its content is not what its hash says")
        return manifest

    def newest_first(self, damaged: list[str]) -> Iterator[RunManifest]:
        """The manifests that are intact; the others are named in `damaged`.

        Raises:
            LakeError: the store is away, which is no damage.
        """
        for sequence in self.sequences():
            body = self._body(sequence)
            try:
                yield self._judged(sequence, body)
            except LakeError as error:
                damaged.append(str(error))

    def write(self, manifest: RunManifest) -> RunManifest:
        """Store `manifest` under the next number, sealed, and return it as it was stored."""
        sequence = max(self.sequences(), default=0)
        while True:
            sequence += 1
            numbered = manifest.model_copy(update={"sequence": sequence}).sealed()
            what = f"writing run manifest {sequence} to {self.uri}"
            if self._lake.retry(what, partial(self._create, _name(sequence), numbered.to_bytes())):
                return numbered  # else another writer was faster: this one is newer still

    def _create(self, name: str, body: bytes) -> bool:
        try:
            self._store.put(name, body, mode="create")
        except AlreadyExistsError:
            return False
        if self._folder is not None:
            sync_path(self._folder / name)
            sync_path(self._folder)
        return True

    def prune(self, keep: int = KEEP) -> int:
        """Remove all but the newest `keep`; returns how many went."""
        old = self.sequences()[keep:]
        for sequence in old:
            self._store.delete(_name(sequence))
        return len(old)


def table_versions(lake: Lake) -> dict[str, int]:
    """The newest Delta version of every table."""
    return {name: lake.version(name) for name in TABLES}


def evaluated_version(lake: Lake) -> int:
    """The newest weight version that the lake has an evaluation of, or 0."""
    rows = lake.read("evals", "what was evaluated", ["requested_version"])
    return pc.max(rows["requested_version"]).as_py() or 0


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 of a checkpoint's manifest, which holds those of its files; empty where it is not complete."""
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def faults(manifest: RunManifest, lake: Lake, weights: WeightStore) -> list[str]:
    """What of `manifest` the lake and the weight store do not have, in words; none if all is there."""
    found: list[str] = []
    for name, version in manifest.tables.items():
        newest = lake.version(name)
        if newest < version:
            found.append(f"table {name} is at version {newest}, the manifest saw {version}: rows are lost")
    digest = weights.digest(manifest.weight_version)
    if digest != manifest.weights_sha256:
        observed = f"has a manifest with SHA-256 {digest[:12]}" if digest else "is not complete"
        found.append(
            f"weight version {manifest.weight_version} in {weights.uri} {observed}, expected "
            f"{manifest.weights_sha256[:12]}"
        )
    return found


def settings_hash(settings: Settings) -> str:
    """SHA-256 of the settings that shape a run; places and addresses are left out."""
    shaping = settings.model_dump_json(include=_SHAPING, exclude={"learner": {"checkpoints"}, "policy": {"path"}})
    return hashlib.sha256(shaping.encode()).hexdigest()


def _name(sequence: int) -> str:
    return f"{sequence:08d}.json"
