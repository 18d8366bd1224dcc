"""What looks after a running flow: its health, the end of a stop, and the end of a flow that stands still."""

import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

from flows.connectors.hold import HOLD
from flows.connectors.pulse import PULSE, log
from infra.telemetry import Stop, Telemetry

_HEALTH_S = 0.5
_DRAIN_S = 8.0
_QUIET_S = 60.0
_STEP_BACK_S = 5.0
"""Bytewax times epochs by the wall clock: set back by more than this, it would stand still for as long."""

SILENT_TWICE = 2
"""After this many times the silence that turns health red the process ends."""


FIRST_EPOCH_S = 600.0
"""Limit of the first epoch: until then processes connect, states are read, and what was pending is committed."""


@contextmanager
def watch(telemetry: Telemetry, stop: Stop, silence_s: float) -> Generator[None]:
    """Report health, and see to it that a stop has an end, while the flow runs in the calling thread."""
    ended = threading.Event()
    PULSE.start()
    started_at = time.monotonic()

    def look() -> None:
        end_at, lost_at, clock_lead_s = None, 0.0, time.time() - time.monotonic()
        while not ended.wait(_HEALTH_S):
            fault = HOLD.lost or PULSE.fault(silence_s, _QUIET_S)
            telemetry.health(not fault, fault)
            stepped_s = time.time() - time.monotonic() - clock_lead_s
            clock_lead_s += max(0.0, stepped_s)
            if stepped_s < -_STEP_BACK_S:
                _give_up(telemetry, f"the clock was set back by {-stepped_s:.0f} s, and epochs would wait for as long")
            if PULSE.silent_s() > SILENT_TWICE * silence_s:
                _give_up(telemetry, fault)
            if PULSE.is_starting and time.monotonic() > started_at + FIRST_EPOCH_S:
                _give_up(telemetry, f"within {FIRST_EPOCH_S:g} s no first epoch, or not all processes: {fault}")
            if HOLD.lost and not lost_at:
                lost_at = time.monotonic()
            if lost_at and time.monotonic() > lost_at + _DRAIN_S:
                _give_up(telemetry, HOLD.lost)
            end_at = end_at or (time.monotonic() + _DRAIN_S if stop else None)
            if end_at is not None and time.monotonic() > end_at:
                log.warning("the flow has not drained within %g s of being asked to end; ending at once", _DRAIN_S)
                telemetry.close()
                os._exit(0)  # as safe as kill -9, which the recovery store is made for

    thread = threading.Thread(target=look, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_DRAIN_S)


def _give_up(telemetry: Telemetry, reason: str) -> NoReturn:
    """End at once with status 1, from a thread of its own: whoever supervises this process starts it again."""
    log.error("stopped: %s; ending with status 1, to go on from the recovery store when started again", reason)
    telemetry.close()
    os._exit(1)
