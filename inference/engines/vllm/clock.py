"""How long an engine was busy, and each request's share of that."""

import time
from collections.abc import Callable


class Clock:
    """Time with requests in flight, divided equally among those that were.

    Attributes:
        busy_s: Seconds with at least one request.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.busy_s = 0.0
        self._now, self._at = now, now()
        self._num, self._share_s = 0, 0.0

    def enter(self) -> float:
        """A request begins; keep what is returned for `leave`."""
        self._advance()
        self._num += 1
        return self._share_s

    def leave(self, entered: float) -> float:
        """A request ends; its share of the busy time, in seconds."""
        self._advance()
        self._num -= 1
        return self._share_s - entered

    def _advance(self) -> None:
        now = self._now()
        elapsed, self._at = now - self._at, now
        if self._num:
            self.busy_s += elapsed
            self._share_s += elapsed / self._num
