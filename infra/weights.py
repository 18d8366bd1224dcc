"""The weight store: immutable weight versions, visible when complete, proven when fetched.

<root>/v00000042/    a Hugging Face folder (safetensors, config, tokenizer), or what makes it out of another version
<root>/v00000042/MANIFEST.json    written last, by a conditional create: a version exists when this does
"""

import hashlib
import os
import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from obstore.exceptions import AlreadyExistsError, BaseError
from prometheus_client import Counter

from infra.fingerprints import fingerprint, fingerprint_file
from infra.retries import reason
from infra.store import exclusive_create_works, local_path, open_store, sync_path
from infra.weight_cache import folder_name, materialize
from infra.weight_files import MANIFEST, check_listed, describe, prove, verify
from infra.weight_packing import Adapters, Base, packed
from schemas.errors import ContractError, WeightStoreError
from schemas.messages import MAX_MESSAGE_BYTES, File, Manifest, decode
from schemas.settings import Settings

__all__ = [
    "MANIFEST",
    "Adapters",
    "WeightStore",
    "describe",
    "exclusive_create_works",
    "fingerprint",
    "fingerprint_file",
]

_NOTHING: Mapping[str, str] = MappingProxyType({})
_FOLDER = re.compile(r"v(\d{8})")
FETCHED = Counter("lagoon_weight_fetched_bytes", "Bytes fetched from the weight store, by kind of version", ["kind"])


class WeightStore:
    """The versions under `uri`, a local folder or an object store.

    Of those that are not adapters every `full_every`-th is full, as is the first.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, str] = _NOTHING, full_every: int = 10):
        folder = local_path(uri)
        self.uri = str(folder) if folder is not None else uri.rstrip("/")
        self._folder, self._full_every = folder, full_every
        self._store = open_store(self.uri, storage_options)
        self._complete: set[int] = set()

    @classmethod
    def of(cls, settings: Settings) -> "WeightStore":
        """The weight store of a run."""
        return cls(settings.weights_uri, settings.weights.storage_options, settings.weights.full_every)

    def versions(self) -> list[int]:
        """The complete versions, ascending."""
        return [version for version in self._present() if self._is_complete(version)]

    def latest(self) -> int:
        """The newest complete version, or 0."""
        return next((version for version in reversed(self._present()) if self._is_complete(version)), 0)

    def version_uri(self, version: int) -> str:
        """Where a version lies."""
        return f"{self.uri}/{folder_name(version)}"

    def manifest(self, version: int) -> Manifest:
        """The manifest of a version.

        Raises:
            WeightStoreError: there is none (the version is incomplete), or it is malformed.
        """
        path = f"{folder_name(version)}/{MANIFEST}"
        self._refuse_links(path)
        try:
            with self._reaching():
                found = self._store.get(path)
                body = bytes(found.bytes()) if found.meta["size"] <= MAX_MESSAGE_BYTES else b""
        except FileNotFoundError as error:
            raise WeightStoreError(
                f"version {version} has no {MANIFEST} in {self.uri}: it was never completed"
            ) from error
        manifest = _parse(body, f"version {version} in {self.uri}, {found.meta['size']} bytes")
        if manifest.version != version:
            raise WeightStoreError(f"{MANIFEST} of version {version} in {self.uri} says version {manifest.version}")
        return manifest

    def digest(self, version: int) -> str:
        """SHA-256 of the manifest of a version, byte for byte; empty where the version is not complete."""
        try:
            with self._reaching():
                return hashlib.sha256(bytes(self._store.get(f"{folder_name(version)}/{MANIFEST}").bytes())).hexdigest()
        except FileNotFoundError:
            return ""

    def publish(
        self, folder: Path, manifest: Manifest, before: Path | None = None, adapters: Adapters | None = None
    ) -> bool:
        """Store the files of `folder` that `manifest` lists, then the manifest, which makes the version visible.

        With `before`, a folder that holds the version before, only the difference is stored, where that saves bytes and
        no full version is due; with `adapters` that make `folder`, byte for byte, and take up to half its bytes, only
        they are. Left-overs of a publication that a crash cut short are overwritten; files that the manifest does not
        list are never used.

        Args:
            folder: the whole version.
            manifest: of a full version, whatever comes of it.
            before: the whole of `manifest.parent`.
            adapters: they take precedence over a delta.

        Returns:
            False where the same content had been published before, of whatever kind.

        Raises:
            WeightStoreError: `folder` is not what the manifest says, or the version exists with other content.
        """
        verify(folder, manifest, self.uri)
        name = folder_name(manifest.version)
        self._refuse_links(name)
        if self._is_complete(manifest.version):
            return self._already(manifest)
        with packed(folder, manifest, adapters, None if adapters else self._base(manifest, before)) as pack:
            for file in pack.manifest.files:
                self._put(f"{name}/{file.name}", pack.folders[file.name] / file.name)
            if not self._create(f"{name}/{MANIFEST}", pack.manifest.to_bytes()):
                return self._already(manifest)
        return True

    def fetch(self, version: int, into: Path) -> Path:
        """The whole of a version in `into/v00000042`, proven: sizes, SHA-256 of each file, fingerprint.

        Of a delta or adapters only what is new is downloaded, where `into` holds a version that they build on.

        Raises:
            WeightStoreError: the version, or one that it builds on, is incomplete or not what its manifest says.
        """
        return materialize(self, version, into)

    def download(self, manifest: Manifest, file: File, into: Path) -> None:
        """Download `file` of a version to `into`; what an earlier try left there is completed, not fetched again.

        Raises:
            WeightStoreError: missing, of another size, or of another SHA-256; then nothing of it stays.
        """
        path = f"{folder_name(manifest.version)}/{file.name}"
        if not into.exists() or into.stat().st_size < file.num_bytes or not file.num_bytes:
            FETCHED.labels(manifest.kind).inc(self._append(path, into, file.num_bytes))
        try:
            prove(into, file, manifest.version, self.uri)
        except WeightStoreError:
            into.unlink()
            raise

    def incomplete(self) -> list[int]:
        """Versions with files but without a manifest, ascending: being published, or left by a crash."""
        return [version for version in self._present() if not self._is_complete(version)]

    def remove(self, version: int) -> int:
        """Remove a version, its manifest first, so that nobody sees it incomplete; returns the bytes freed.

        Finishes a removal that was cut short. Whether anything still needs the version is for the caller to know.

        Raises:
            WeightStoreError: it is the newest version, without which services and learner cannot start.
        """
        if version >= self.latest():
            raise WeightStoreError(f"version {version} is the newest in {self.uri} and stays")
        self._complete.discard(version)
        with self._reaching():
            files = [item for batch in self._store.list(f"{folder_name(version)}/") for item in batch]
            files.sort(key=lambda item: not item["path"].endswith(f"/{MANIFEST}"))
            for item in files:
                with suppress(FileNotFoundError):
                    self._store.delete(item["path"])
        if self._folder is not None:
            shutil.rmtree(self._folder / folder_name(version), ignore_errors=True)
        return sum(item["size"] for item in files)

    def _base(self, manifest: Manifest, before: Path | None) -> Base | None:
        """What a delta may build on; None where the version is to be full."""
        if before is None or manifest.parent is None or (manifest.version - 1) % self._full_every == 0:
            return None
        try:
            parent = step = self.manifest(manifest.parent)
            chain_bytes = 0
            while step.kind != "full":
                check_listed(step, self.uri)
                chain_bytes += step.num_bytes
                step = self.manifest(step.builds_on or 0)
        except WeightStoreError:  # missing or damaged: a full version is what readers need now
            return None
        return Base(before, parent, chain_bytes)

    def _already(self, manifest: Manifest) -> bool:
        stored = self.manifest(manifest.version)
        if _content(stored) == _content(manifest):
            return False
        raise WeightStoreError(
            f"version {manifest.version} is already published in {self.uri} with other content (fingerprint "
            f"{stored.fingerprint[:12]}, now {manifest.fingerprint[:12]}). Versions are immutable: publish under "
            f"{self.latest() + 1}, and check that no second learner writes to this store"
        )

    def _present(self) -> list[int]:
        """Versions with a folder, complete or not, ascending."""
        with self._reaching():
            prefixes = self._store.list_with_delimiter()["common_prefixes"]
        names = [str(prefix).rstrip("/").rsplit("/", 1)[-1] for prefix in prefixes]
        return sorted(int(match[1]) for match in map(_FOLDER.fullmatch, names) if match)

    def _is_complete(self, version: int) -> bool:
        if version in self._complete:
            return True
        try:
            with self._reaching():
                self._store.head(f"{folder_name(version)}/{MANIFEST}")
        except FileNotFoundError:
            return False
        self._complete.add(version)
        return True

    def _append(self, path: str, into: Path, num_bytes: int) -> int:
        """Append what `into` lacks of `path`, of which nothing is taken where its size is not `num_bytes`."""
        self._refuse_links(path)
        done = into.stat().st_size if into.exists() else 0
        try:
            with self._reaching(), into.open("ab") as file:
                found = self._store.get(path, options={"range": {"offset": done}} if done else None)
                if found.meta["size"] != num_bytes:
                    raise WeightStoreError(
                        f"{self.uri}/{path} has {found.meta['size']} bytes; the manifest says {num_bytes} bytes"
                    )
                for chunk in found.stream():
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
                return file.tell() - done
        except FileNotFoundError as error:
            raise WeightStoreError(f"{self.uri}/{path} is missing though its manifest lists it") from error

    def _put(self, path: str, source: Path) -> None:
        with self._reaching():
            self._store.put(path, source)
        self._sync(path)

    def _create(self, path: str, body: bytes) -> bool:
        try:
            with self._reaching():
                self._store.put(path, body, mode="create")
        except AlreadyExistsError:
            return False
        self._sync(path)
        return True

    @contextmanager
    def _reaching(self) -> Generator[None]:
        """Turn failures of the store, but for a missing or existing object, into a WeightStoreError."""
        try:
            yield
        except AlreadyExistsError:
            raise
        except BaseError as error:
            text = reason(error, self._folder)
            raise WeightStoreError(f"weight store {self.uri} cannot be reached or refuses: {text}") from error

    def _refuse_links(self, path: str) -> None:
        """On a local folder, neither read nor write through a link in it: what it names lies elsewhere."""
        if self._folder is None:
            return
        for place in (self._folder / path, (self._folder / path).parent):
            if place != self._folder and place.is_symlink():
                raise WeightStoreError(f"{place} is a link, expected plain files and folders; remove it")

    def _sync(self, path: str) -> None:
        """On a local folder, survive a power cut: file first, then the folder that names it."""
        if self._folder is not None:
            sync_path(self._folder / path)
            sync_path((self._folder / path).parent)


def _parse(body: bytes, what: str) -> Manifest:
    try:
        return decode(Manifest, body)
    except ContractError as error:
        raise WeightStoreError(f"{what}: malformed {MANIFEST}: {error}") from error


def _content(manifest: Manifest) -> tuple[object, ...]:
    return manifest.parent, manifest.fingerprint, frozenset((f.name, f.num_bytes, f.sha256) for f in manifest.contents)
