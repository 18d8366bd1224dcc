"""How an episode ends, and whose doing it is: the agent's, with a reward, or the infrastructure's, without one."""

import asyncio
from dataclasses import dataclass

from inference.transcript import Transcript
from schemas.names import ErrorKind, Status, StopReason
from schemas.trajectory import Reward

MAX_ERROR = 2000
"""Characters of an error that a trajectory keeps."""

STALE = "its oldest token lags by more than loop.max_staleness"
"""Message with which an episode is cancelled that nobody could train on any more."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an episode ended."""

    status: Status
    stop_reason: StopReason
    reward: float | None
    parts: tuple[Reward, ...] = ()
    error_kind: ErrorKind | None = None
    error: str | None = None


def truncated(reason: StopReason, kind: ErrorKind | None = None, error: str | None = None) -> Ending:
    """Cut off by a limit of the agent's: a reward of 0."""
    return Ending(Status.TRUNCATED, reason, 0.0, error_kind=kind, error=error)


def failed(kind: ErrorKind, error: str, reason: StopReason = StopReason.ERROR) -> Ending:
    """Broken by the infrastructure: no reward."""
    return Ending(Status.FAILED, reason, None, error_kind=kind, error=error[:MAX_ERROR])


def cut(error: asyncio.CancelledError) -> Ending:
    """Why the episode was cancelled."""
    if error.args == (STALE,):
        return failed(ErrorKind.STALE_IN_FLIGHT, STALE, StopReason.STALE)
    return failed(ErrorKind.SHUTDOWN, "the service was stopped", StopReason.SHUTDOWN)


def fault(ending: Ending, said: Transcript) -> tuple[ErrorKind | None, str | None]:
    """What explains an episode without success: its own ending, else the first call that went wrong."""
    if ending.error_kind is None and said.fault is not None and not ending.reward:
        return said.fault
    return ending.error_kind, ending.error
