"""Which episodes count: those that a proven engine sampled. A load is proven after it, and episodes may end between."""

import asyncio
import dataclasses
import math
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from schemas.names import ErrorKind, Status, StopReason
from schemas.trajectory import Trajectory


class Trust:
    """Knows of an engine's loads which are being proven and which could not be, and judges episodes by it.

    Tokens know their version, not their load: one that could not be proven is held against every episode that began
    while it lasted, also where a later load of the same version was proven.
    """

    def __init__(self) -> None:
        self._proving: int | None = None
        self._over = asyncio.Event()
        self._unproven_until_s: dict[int, float] = {}

    @contextmanager
    def proof(self, version: int) -> Generator[None]:
        """Load `version` inside, and prove it; what raises has proven nothing. One proof at a time."""
        self._proving, self._over = version, asyncio.Event()
        try:
            yield
            now_s = time.monotonic()
            self._unproven_until_s = {v: min(until_s, now_s) for v, until_s in self._unproven_until_s.items()}
        except BaseException:
            self._unproven_until_s[version] = math.inf  # until something is loaded that can be proven
            raise
        finally:
            self._proving = None
            self._over.set()

    async def judged(self, trajectory: Trajectory, since_s: float) -> Trajectory:
        """`trajectory`, or a failed one without reward where weights that could not be proven sampled part of it.

        Waits for the proof of a version that is in it; who cancels the call gets an answer as if that had failed.

        Args:
            trajectory: of an episode that has ended.
            since_s: the monotonic time at which it began.
        """
        versions = {span.version for span in trajectory.weight_version_spans}
        with suppress(asyncio.CancelledError):
            while self._proving in versions:
                await self._over.wait()
        bad = [v for v in versions if v == self._proving or self._unproven_until_s.get(v, -math.inf) >= since_s]
        return _distrusted(trajectory, sorted(bad)) if bad else trajectory


def _distrusted(trajectory: Trajectory, versions: list[int]) -> Trajectory:
    return dataclasses.replace(
        trajectory,
        status=Status.FAILED,
        stop_reason=StopReason.ERROR,
        error_kind=ErrorKind.ENGINE,
        error=f"partly sampled by weight versions {versions}, which could not be proven",
        reward=None,
    )
