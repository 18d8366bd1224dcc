"""Finished episodes on their way into the outbox, also while its disk is full.

They then wait in memory, and for as long no task is pulled, so there are never more of them than may run at once.
"""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from infra import disk
from schemas.errors import LagoonError
from schemas.trajectory import Trajectory

_RETRY_S = 0.5


class Keeper:
    """Hands finished episodes to `keep`, which writes them to the outbox in `folder`, in the order of their ends."""

    def __init__(self, keep: Callable[[Trajectory], None], folder: Path, retry_s: float = _RETRY_S) -> None:
        self._keep, self._folder, self._retry_s = keep, folder, retry_s
        self._waiting: deque[Trajectory] = deque()
        self._retry_at = 0.0

    def finished(self, trajectory: Trajectory) -> None:
        """Keep an episode, now or when there is room."""
        self._waiting.append(trajectory)
        if len(self._waiting) == 1:
            self._drain()

    def retry(self) -> None:
        """Keep what waits, if it is time to try."""
        if self._waiting and time.monotonic() >= self._retry_at:
            self._drain()

    @property
    def fault(self) -> str:
        """Why nothing new may begin; empty where everything is kept."""
        if not self._waiting:
            return ""
        return (
            f"{disk.full(self._folder)}. {len(self._waiting)} finished episodes wait in memory for the outbox. "
            "Decision: no tasks are pulled until they are written"
        )

    def close(self) -> None:
        """Nothing may wait any more.

        Raises:
            LagoonError: something does.
        """
        if self._waiting:
            raise LagoonError(
                f"{len(self._waiting)} finished episodes are lost, because the outbox could not be written: "
                f"{disk.full(self._folder)}. None of them was counted; their groups are issued again"
            )

    def _drain(self) -> None:
        try:
            while self._waiting:
                self._keep(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not disk.is_full(error):
                raise
            self._retry_at = time.monotonic() + self._retry_s
