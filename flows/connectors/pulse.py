"""Signs of life that sources and sinks of this process give, for its health."""

import logging
import math
import threading
import time

from schemas.errors import BrokerError

log = logging.getLogger("lagoon.flows")

_QUIET = "nothing has come for {:.0f} s, not even the dispatcher's clock: is dispatch up? Decision: wait on"


class Pulse:
    """Who is in trouble and since when, and when each part last finished an epoch. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._beats: dict[str, float] = {}
        self._troubles: dict[str, str] = {}
        self._begun = False
        self._stands = False
        self._awaited: set[str] = set()
        self._active_at = time.monotonic()

    def start(self) -> None:
        """A flow is about to run: its processes connect, its parts are built, and finish a first epoch."""
        with self._lock:
            self._stands = False
            self._awaited.clear()

    def stand(self) -> None:
        """The processes are connected, and this one builds its parts; it may have none."""
        self._stands = True

    def expect(self, part: str) -> None:
        """`part` is there and is to finish its first epoch."""
        with self._lock:
            self._awaited.add(part)

    @property
    def is_starting(self) -> bool:
        """Whether the flow does not stand yet, or one of its parts here has not finished an epoch."""
        return not self._stands or bool(self._awaited)

    def beat(self, part: str) -> None:
        """`part` has finished an epoch."""
        with self._lock:
            self._beats[part] = time.monotonic()
            self._awaited.discard(part)
            self._begun = True

    def active(self) -> None:
        """A source has emitted something."""
        self._active_at = time.monotonic()

    def quiet_s(self) -> float:
        """Seconds since a source of this process emitted something."""
        return time.monotonic() - self._active_at

    def end(self, part: str) -> None:
        """`part` has ended; its silence is no fault."""
        with self._lock:
            self._beats.pop(part, None)
            self._awaited.discard(part)
            self._troubles.pop(part, None)

    def trouble(self, part: str, reason: str | None) -> None:
        """`part` waits for `reason`, or for nothing any more (None)."""
        with self._lock:
            if reason is None:
                self._troubles.pop(part, None)
            else:
                self._troubles[part] = reason

    def silent_s(self) -> float:
        """Seconds since the part that has been silent for longest finished an epoch; 0 before the first one."""
        with self._lock:
            return time.monotonic() - min(self._beats.values()) if self._beats else 0.0

    def fault(self, silence_s: float, quiet_s: float = math.inf) -> str:
        """What is wrong, in words; empty if nothing.

        A trouble, a part without an epoch for `silence_s`, or nothing at all that was emitted for `quiet_s`.
        """
        with self._lock:
            now = time.monotonic()
            silent = [f"{p}: no epoch for {now - at:.0f} s" for p, at in self._beats.items() if now - at > silence_s]
            begun = [] if self._begun else ["no epoch has ended yet"]
            quiet = [_QUIET.format(self.quiet_s())] if self._begun and self.quiet_s() > quiet_s else []
            return "; ".join([f"{p}: {reason}" for p, reason in self._troubles.items()] + silent + begun + quiet)


PULSE = Pulse()
"""Of this process."""


class Patience:
    """How long a part waits for the broker: a trouble is logged, seen in health, and at the limit an error."""

    def __init__(self, part: str, limit_s: float) -> None:
        self._part, self._limit_s = part, limit_s
        self._since: float | None = None

    def ok(self) -> None:
        """The broker has answered."""
        if self._since is not None:
            log.warning("%s: the broker is back after %.1f s", self._part, time.monotonic() - self._since)
            self._since = None
            PULSE.trouble(self._part, None)

    def trouble(self, reason: str) -> None:
        """The broker has not answered, or with an error that may pass.

        Raises:
            BrokerError: troubles have lasted longer than the limit.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
            log.warning("%s: waiting up to %g s for the broker: %s", self._part, self._limit_s, reason)
            PULSE.trouble(self._part, f"waiting for the broker: {reason}")
        if now - self._since > self._limit_s:
            raise BrokerError(
                f"{self._part}: the broker has been away for {now - self._since:.0f} s, expected at most "
                f"{self._limit_s:g} s (kafka.timeout_s): {reason}; this process ends, and reads on from its recovery "
                "store when it is started again"
            )
