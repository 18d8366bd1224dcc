"""Follows the weight store: fetch, verify, load, prove; then serve. What cannot be proven is never served for long.

The hashes of a version prove the files; a probe proves the engine: its logprobs for the manifest's tokens must be the
learner's. A version that fails is named and skipped, and the one before it stays.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from obstore.exceptions import BaseError
from prometheus_client import Counter, Gauge

from inference.engines.base import Engine, EngineError
from schemas.errors import LagoonError, WeightStoreError
from schemas.messages import Manifest
from schemas.settings import Settings

SERVING = Gauge("lagoon_serving_weight_version", "Weight version that samples now")
POLICY_LAG = Gauge("lagoon_policy_lag", "Newest published version - serving version")
SWAPS = Counter("lagoon_weight_swaps", "Weight versions loaded and proven")
BROKEN = Counter("lagoon_broken_weight_versions", "Attempts at a weight version that failed")

PROBE_TOLERANCE = {"fp32": 2e-3, "bf16": 1e-1}
"""Largest difference of a logprob, engine against learner at equal weights, by the learner's precision."""

_NOTHING_PUBLISHED = "no version has been published yet"

MakeEngine = Callable[[Path, int], Engine]
"""(Hugging Face folder, version) -> an engine that serves it."""

STORE_ERRORS = (LagoonError, OSError, BaseError)


class Store(Protocol):
    """What is read of `infra.weights.WeightStore`."""

    def versions(self) -> list[int]: ...
    def manifest(self, version: int) -> Manifest: ...
    def fetch(self, version: int, into: Path) -> Path: ...


class Server:
    """An engine and the versions that it is given. The engine is made with the first one.

    Attributes:
        engine: None before the first version is loaded.
        folder: The folder of the version that was proven last.
    """

    def __init__(self, store: Store, make_engine: MakeEngine, cache: Path, precision: str) -> None:
        self.engine: Engine | None = None
        self.folder: Path | None = None
        self._store, self._make_engine, self._cache = store, make_engine, cache
        self._tolerance = PROBE_TOLERANCE[precision]

    @property
    def loaded(self) -> int:
        """The version that the engine holds, proven or not; 0 before the first."""
        return self.engine.weight_version if self.engine else 0

    @property
    def current(self) -> tuple[Engine, Path]:
        """The engine, and the folder of the version that was proven last.

        Raises:
            EngineError: nothing was proven yet.
        """
        if self.engine is None or self.folder is None:
            raise EngineError("no weights are served yet")
        return self.engine, self.folder

    async def serve(self, version: int) -> Manifest:
        """Fetch, verify and load `version`, and prove that the engine serves it.

        Raises:
            WeightStoreError: incomplete or altered, or the engine's logprobs are not the learner's.
            EngineError: the engine cannot load it.
        """
        manifest = await asyncio.to_thread(self._store.manifest, version)
        folder = await asyncio.to_thread(self._store.fetch, version, self._cache)
        if self.engine is None:
            self.engine = await asyncio.to_thread(self._make_engine, folder, version)
        else:
            await self.engine.load(version, folder)
        await prove(self.engine, manifest, self._tolerance)
        self.folder = folder
        return manifest

    async def restore(self, manifest: Manifest) -> None:
        """Load again the version that was proven last, without asking the store.

        Raises:
            WeightStoreError, EngineError: as `serve`.
        """
        engine, folder = self.current
        await engine.load(manifest.version, folder)
        await prove(engine, manifest, self._tolerance)

    def keep(self, versions: Iterable[int]) -> None:
        """Remove what was fetched of all other versions."""
        kept = {f"v{version:08d}" for version in versions}
        for folder in self._cache.glob("v*"):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        """Close the engine."""
        if self.engine is not None:
            await self.engine.close()


async def prove(engine: Engine, manifest: Manifest, tolerance: float) -> None:
    """Compare the engine's logprobs for the manifest's probe with the learner's.

    Raises:
        WeightStoreError: they differ by more than `tolerance`.
    """
    if manifest.probe is None:
        return
    scored = await engine.score(manifest.probe.token_ids)
    pairs = list(zip(scored, manifest.probe.logprobs, strict=False))
    worst = max((abs(a - b) for a, b in pairs), default=0.0)
    if len(scored) != len(manifest.probe.logprobs) or not worst <= tolerance:
        raise WeightStoreError(
            f"version {manifest.version} is loaded but not proven: of {len(scored)} probe logprobs the worst is "
            f"{worst:.3g} off, expected {len(manifest.probe.logprobs)} within {tolerance:g} of the learner's"
        )


class WeightFollower:
    """Keeps an engine at the newest version that can be proven.

    Attributes:
        latest: Newest version in the store, 0 before there is one.
        manifest: Of the version that is served; None before the first.
        faults: Version -> why it is not served. Versions up to the served one are not listed.
        distrusted: Versions that were loaded and could not be proven; tokens they sampled are no training material.
    """

    def __init__(self, settings: Settings, store: Store, server: Server, retry_s: float = 5.0) -> None:
        self.latest = 0
        self.manifest: Manifest | None = None
        self.faults: dict[int, str] = {}
        self.distrusted: set[int] = set()
        self._store_error = _NOTHING_PUBLISHED
        self._store, self._server = store, server
        self._max_staleness, self._timeout_s = settings.loop.max_staleness, settings.weights.timeout_s
        self._poll_s, self._retry_s = settings.weights.poll_s, retry_s
        self._retry_at: dict[int, float] = {}
        self._read_at = time.monotonic()
        self._lock = asyncio.Lock()

    @property
    def serving(self) -> int:
        """The version that is served, 0 before the first."""
        return self.manifest.version if self.manifest else 0

    @property
    def fingerprint(self) -> str:
        """Fingerprint of what is served; empty before the first version."""
        return self.manifest.fingerprint if self.manifest else ""

    @property
    def lag(self) -> int:
        """Policy lag, in versions."""
        return self.latest - self.serving

    def blocked(self) -> str:
        """Why no episode may start now; empty when one may."""
        silent_s = time.monotonic() - self._read_at
        if not self.serving:
            return f"no weights are served: {self._fault()}"
        if silent_s > self._timeout_s:
            return f"no readable manifest for {silent_s:.0f} s (weights.timeout_s {self._timeout_s:g}): {self._fault()}"
        if self.lag > self._max_staleness:
            return (
                f"serving version {self.serving} is {self.lag} behind {self.latest}, more than loop.max_staleness "
                f"{self._max_staleness}: {self._fault()}"
            )
        return ""

    def warning(self) -> str:
        """What is wrong though episodes may start; empty when nothing is."""
        if not self.faults:
            return ""
        return f"serving version {self.serving}, fingerprint {self.fingerprint[:12]}: {self._fault()}"

    async def follow(self) -> bool:
        """Look once, and swap to the newest version that can be proven; true if it did."""
        async with self._lock:
            try:
                versions = await asyncio.to_thread(self._store.versions)
            except STORE_ERRORS as error:
                self._store_error = f"the weight store cannot be read: {error}"
                return False
            self._store_error = "" if versions else _NOTHING_PUBLISHED
            self.latest = max(versions, default=self.latest)
            swapped = await self._swap([v for v in versions if v > self.serving])
            if swapped or self.serving in versions:
                self._read_at = time.monotonic()
            POLICY_LAG.set(self.lag)
            return swapped

    async def at_least(self, version: int, timeout_s: float) -> bool:
        """Wait until `version` or a later one is served; false at the limit. Something else calls `follow`."""
        deadline = time.monotonic() + timeout_s
        while self.serving < version and time.monotonic() < deadline:
            await asyncio.sleep(self._poll_s)
        return self.serving >= version

    async def _swap(self, newer: list[int]) -> bool:
        for version in sorted(newer, reverse=True):
            if time.monotonic() >= self._retry_at.get(version, 0) and await self._serve(version):
                return True
        return False

    async def _serve(self, version: int) -> bool:
        before = self._server.loaded
        try:
            manifest = await self._server.serve(version)
        except STORE_ERRORS as error:
            BROKEN.inc()
            self.faults[version] = f"version {version} skipped: {error}"
            self._retry_at[version] = time.monotonic() + self._retry_s
            if self._server.loaded != before:
                self.distrusted.add(version)
                await self._go_back()
            return False
        self._accept(manifest)
        return True

    async def _go_back(self) -> None:
        """Serve again what was served before. If even that fails nothing is served, and dispatch stops."""
        manifest, self.manifest = self.manifest, None
        if manifest is None:
            return
        try:
            await self._server.restore(manifest)
            self.manifest = manifest
        except STORE_ERRORS as error:
            self.faults[manifest.version] = f"version {manifest.version} cannot be loaded again: {error}"

    def _accept(self, manifest: Manifest) -> None:
        self._server.keep([self.serving, manifest.version])  # the one before, to go back to
        self.manifest = manifest
        self.distrusted.discard(manifest.version)
        self.faults = {v: reason for v, reason in self.faults.items() if v > manifest.version}
        self._retry_at = {v: at for v, at in self._retry_at.items() if v > manifest.version}
        SERVING.set(manifest.version)
        SWAPS.inc()

    def _fault(self) -> str:
        return self.faults[max(self.faults)] if self.faults else self._store_error or "the swap is still to come"
