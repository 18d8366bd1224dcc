"""Follows the weight store: what is served is the newest version that can be proven.

A version that cannot be is named and skipped, and the one before it stays.
"""

import asyncio
import time

from prometheus_client import Counter, Gauge

from inference.engines.base import EngineError
from inference.serving import STORE_ERRORS, Server, Store
from schemas.messages import Manifest
from schemas.settings import Settings

SERVING = Gauge("lagoon_serving_weight_version", "Weight version that samples now")
POLICY_LAG = Gauge("lagoon_policy_lag", "Newest published version - serving version")
SWAPS = Counter("lagoon_weight_swaps", "Weight versions loaded and proven")
REVIVED = Counter("lagoon_engine_revivals", "Attempts to bring back an engine that died")
BROKEN = Counter("lagoon_broken_weight_versions", "Attempts at a weight version that failed")

_MAX_DOUBLINGS = 5
"""Of the pause between attempts to bring an engine back."""
_NOTHING_PUBLISHED = "no version has been published yet"


class WeightFollower:
    """Keeps an engine at the newest version that can be proven.

    Attributes:
        latest: Newest version in the store, 0 before there is one.
        manifest: Of the version that is served; None before the first.
        faults: Version -> why it is not served. Versions up to the served one are not listed.
    """

    def __init__(self, settings: Settings, store: Store, server: Server, retry_s: float = 5.0) -> None:
        self.latest = 0
        self.manifest: Manifest | None = None
        self.faults: dict[int, str] = {}
        self._store_error = _NOTHING_PUBLISHED
        self._store, self._server = store, server
        self._max_staleness, self._timeout_s = settings.loop.max_staleness, settings.weights.timeout_s
        self._poll_s, self._retry_s = settings.weights.poll_s, retry_s
        self._retry_at: dict[int, float] = {}
        self._revive_at, self._num_revivals = 0.0, 0
        self._read_at = time.monotonic()
        self._lock = asyncio.Lock()
        self._looking: asyncio.Future[bool] | None = None
        self._given_up = False

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

    @property
    def can_sample(self) -> bool:
        """Whether an engine runs that episodes could be with."""
        return self.serving > 0 and not self._server.fault

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
        """Look once, and swap to the newest version that can be proven; true if it did. Not after `give_up`."""
        async with self._lock:
            if self._given_up:
                return False
            self._looking = asyncio.ensure_future(self._look())
            try:
                return await self._looking
            except asyncio.CancelledError:
                if self._given_up:
                    return False
                raise

    def give_up(self) -> None:
        """End the look that is under way, and begin no other: to start an engine may take minutes."""
        self._given_up = True
        if self._looking is not None:
            self._looking.cancel()

    async def at_least(self, version: int, timeout_s: float) -> bool:
        """Wait until `version` or a later one is served; false at the limit. Something else calls `follow`."""
        deadline = time.monotonic() + timeout_s
        while self.serving < version and time.monotonic() < deadline:
            await asyncio.sleep(self._poll_s)
        return self.serving >= version

    async def _look(self) -> bool:
        if self._server.fault and not await self._revive():
            return False
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

    async def _swap(self, newer: list[int]) -> bool:
        for version in sorted(newer, reverse=True):
            if time.monotonic() >= self._retry_at.get(version, 0) and await self._serve(version):
                return True
            if self._server.fault:  # an older version would find the same engine
                return False
        return False

    async def _revive(self) -> bool:
        """Bring back an engine that died with what it served, after ever longer pauses; true if it may be tried."""
        if time.monotonic() < self._revive_at:
            return False
        REVIVED.inc()
        self._revive_at = time.monotonic() + self._retry_s * 2 ** min(self._num_revivals, _MAX_DOUBLINGS)
        self._num_revivals += 1
        if self.manifest is None:
            return True
        self.faults[self.serving] = f"version {self.serving} is being brought back: {self._server.fault}"
        await self._go_back()
        if self.serving:
            self._num_revivals = 0
            del self.faults[self.serving]
        return bool(self.serving)

    async def _serve(self, version: int) -> bool:
        before = self._server.loaded
        try:
            manifest = await self._server.serve(version)
        except STORE_ERRORS as error:
            BROKEN.inc()
            self.faults[version] = f"version {version} skipped: {error}"
            self._retry_at[version] = time.monotonic() + self._retry_s
            if self._server.loaded != before or isinstance(error, EngineError):
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
        self.manifest, self._num_revivals = manifest, 0
        self.faults = {v: reason for v, reason in self.faults.items() if v > manifest.version}
        self._retry_at = {v: at for v, at in self._retry_at.items() if v > manifest.version}
        SERVING.set(manifest.version)
        SWAPS.inc()

    def _fault(self) -> str:
        return self.faults[max(self.faults)] if self.faults else self._store_error or "the swap is still to come"
