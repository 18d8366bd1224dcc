"""Turns on something that processes of one machine share, a card: at most one of them has it at a time."""

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from infra.locks import taken
from schemas.settings import Settings


class Turn:
    """A process's side of the turns that are taken on the file `path`, which names whose the last one was.

    The kernel ends the turn of one that dies.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock, self._name = path, clock, uuid.uuid4().bytes
        self._held: int | None = None
        self._since_s, self._own_s = clock(), 0.0

    def take(self) -> bool:
        """Take the turn unless another one has it; true if it is held now. Never waits."""
        if self._held is not None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            if not taken(descriptor):
                os.close(descriptor)
                return False
            was_own = os.pread(descriptor, len(self._name), 0) == self._name
            os.pwrite(descriptor, self._name, 0)
        except OSError:  # a full disk
            os.close(descriptor)
            raise
        self._own_s += self._clock() - self._since_s if was_own else 0.0
        self._held, self._since_s = descriptor, self._clock()
        return True

    def release(self) -> None:
        """Let another one take it; safe to repeat."""
        if self._held is not None:
            self._own_s, self._since_s = self.own_s(), self._clock()
            os.close(self._held)
            self._held = None

    def own_s(self) -> float:
        """Seconds of this side's turns ever, and between two of them that followed one another."""
        return self._own_s + (self._clock() - self._since_s if self._held is not None else 0.0)


class Own:
    """The side of a process that shares nothing: it is always its turn."""

    def take(self) -> bool:
        """True."""
        return True

    def release(self) -> None:
        """Nobody waits for it."""


def device_turn(settings: Settings) -> Turn | None:
    """Turns on the card that learner and rollout server share; None where each has its own (`vllm.share_device`)."""
    return Turn(settings.run.folder / "device.turn") if settings.vllm.share_device else None
