"""An engine and the weight versions it is given: fetched, verified, loaded, proven.

The hashes of a version prove the files; a probe proves the engine: its logprobs for the manifest's tokens must be the
learner's.
"""

import asyncio
import json
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from obstore.exceptions import BaseError
from prometheus_client import Counter, Gauge

from inference.engines.base import Engine, EngineError, in_time
from inference.trust import Trust
from infra.weight_cache import prune
from schemas.errors import LagoonError, WeightStoreError
from schemas.messages import Manifest
from schemas.settings import Settings

PROBE_TOLERANCE = {"fp32": 2e-3, "bf16": 1e-1}
"""Largest difference of a logprob, engine against learner at equal weights, by the precision that both compute in.

In float32 both engines differ from the learner by less than 1e-5 on a CPU; the rest is for other kernels.
"""

PROOFS = "proofs.jsonl"
PROBES = Counter("lagoon_probes", "Weight versions that an engine loaded and was asked to prove", ["outcome"])
PROBE_DIFFERENCE = Gauge("lagoon_probe_difference", "Largest difference of a logprob in the last probe")

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
        trust: Which episodes with its tokens count.
    """

    def __init__(self, store: Store, make_engine: MakeEngine, cache: Path, precision: str) -> None:
        self.engine: Engine | None = None
        self.folder: Path | None = None
        self.trust = Trust()
        self._store, self._make_engine, self._cache = store, make_engine, cache
        self._tolerance = PROBE_TOLERANCE[precision]

    @property
    def loaded(self) -> int:
        """The version that the engine holds, proven or not; 0 before the first."""
        return self.engine.weight_version if self.engine else 0

    @property
    def fault(self) -> str:
        """Why the engine can serve nothing until a version is loaded again; empty when it can."""
        return self.engine.fault if self.engine else ""

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
        with self.trust.proof(version):
            if self.engine is None:
                made = asyncio.to_thread(self._make_engine, folder, version)
                self.engine = await in_time(made, f"read version {version}")
            else:
                await self.engine.load(version, folder)
            await self._prove(self.engine, manifest)
        self.folder = folder
        return manifest

    async def restore(self, manifest: Manifest) -> None:
        """Load again the version that was proven last, without asking the store.

        Raises:
            WeightStoreError, EngineError: as `serve`.
        """
        engine, folder = self.current
        was_dead = bool(engine.fault)
        if was_dead:  # it samples nothing until it is up, and what it has sampled was proven
            await engine.load(manifest.version, folder)
        with self.trust.proof(manifest.version):
            if not was_dead:
                await engine.load(manifest.version, folder)
            await self._prove(engine, manifest)

    def keep(self, versions: Iterable[int]) -> None:
        """Remove what was fetched of all other versions, but for what they build on."""
        prune(self._cache, versions)

    async def close(self) -> None:
        """Close the engine; the next version that is served makes a new one."""
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close()

    async def _prove(self, engine: Engine, manifest: Manifest) -> None:
        """Prove, and leave a line about it in `proofs.jsonl` of the cache folder; none if cancelled on the way."""
        try:
            difference = await prove(engine, manifest, self._tolerance)
        except LagoonError as error:
            self._note(manifest.version, exact=False, error=str(error))
            raise
        self._note(manifest.version, exact=True, difference=difference)

    def _note(self, version: int, **found: object) -> None:
        line = {"version": version, "at": datetime.now(UTC).isoformat(), **found}
        with suppress(OSError), open(self._cache / PROOFS, "a") as file:  # a full disk must not hold weights up
            file.write(json.dumps(line) + "\n")


def serving_precision(settings: Settings, engine: str) -> str:
    """What `engine` and the learner's probe both compute in, a key of PROBE_TOLERANCE.

    The probe is computed in float32 where a rank holds all weights, also of a policy in bfloat16.
    """
    coarse = engine == "vllm" and settings.vllm.dtype != "float32"
    partitioned = settings.learner.precision == "bf16" and settings.learner.zero_stage == 3
    return "bf16" if coarse or partitioned else "fp32"


async def prove(engine: Engine, manifest: Manifest, tolerance: float) -> float:
    """Compare the engine's logprobs for the manifest's probe with the learner's; returns the largest difference.

    Raises:
        WeightStoreError: it is above `tolerance`.
    """
    if manifest.probe is None:
        return 0.0
    scored, wanted = await engine.score(manifest.probe.token_ids), manifest.probe.logprobs
    worst = max((_distance(a, b) for a, b in zip(scored, wanted, strict=False)), default=math.inf)
    if len(scored) != len(wanted) or worst > tolerance:
        PROBES.labels("wrong").inc()
        raise WeightStoreError(
            f"version {manifest.version} is loaded but not proven: of {len(scored)} probe logprobs the worst is "
            f"{worst:.3g} off, expected {len(wanted)} within {tolerance:g} of the learner's"
        )
    PROBES.labels("exact").inc()
    PROBE_DIFFERENCE.set(worst)
    return worst


def _distance(a: float, b: float) -> float:
    return math.inf if math.isnan(a - b) else abs(a - b)
