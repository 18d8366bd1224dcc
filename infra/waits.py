"""What this process waits for right now. `/healthz` shows every wait that lasts, with its reason and its limit."""

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

log = logging.getLogger("lagoon.waits")

SHOWN_AFTER_S = 2.0
"""A wait that is over sooner is nobody's concern."""


class Wait:
    """One wait: for what, since when, until when at most, and what happens then."""

    def __init__(self, what: str, limit_s: float, decision: str) -> None:
        self.what, self.limit_s, self.decision = what, limit_s, decision
        self.since = time.monotonic()
        self.reason = "no answer yet"
        self.was_said = False

    def note(self, reason: str) -> None:
        """Why it is not over yet; said in the log once it has lasted."""
        self.reason = reason
        if self.lasts and not self.was_said:
            self.was_said = True
            log.warning("%s", self)

    @property
    def lasts(self) -> bool:
        """Whether it is worth telling."""
        return time.monotonic() - self.since >= SHOWN_AFTER_S

    def __str__(self) -> str:
        waited_s = time.monotonic() - self.since
        return f"{self.what}: waiting for {waited_s:.0f} of {self.limit_s:g} s, then {self.decision} ({self.reason})"


class Waits:
    """The waits of a process; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: list[Wait] = []

    @contextmanager
    def on(self, what: str, limit_s: float, decision: str) -> Generator[Wait]:
        """Wait for `what` inside. Whoever waits keeps the limit; this only shows it."""
        wait = Wait(what, limit_s, decision)
        with self._lock:
            self._waits.append(wait)
        try:
            yield wait
        finally:
            with self._lock:
                self._waits.remove(wait)
            if wait.was_said:
                log.warning("%s: the wait of %.1f s is over", wait.what, time.monotonic() - wait.since)

    def fault(self) -> str:
        """The waits that last, in words; empty without one."""
        with self._lock:
            return "; ".join(str(wait) for wait in self._waits if wait.lasts)


WAITS = Waits()
"""Of this process."""
