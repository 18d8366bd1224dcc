"""Turns on something that processes of one machine share, a card: at most one of them has it at a time."""

import fcntl
import os
from pathlib import Path

from schemas.settings import Settings


class Turn:
    """A process's side of the turns that are taken on the file `path`. The kernel ends the turn of one that dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: int | None = None

    def take(self) -> bool:
        """Take the turn unless another one has it; true if it is held now. Never waits."""
        if self._held is not None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._held = descriptor
        return True

    def release(self) -> None:
        """Let another one take it; safe to repeat."""
        if self._held is not None:
            os.close(self._held)
            self._held = None


def device_turn(settings: Settings) -> Turn | None:
    """Turns on the card that learner and rollout server share; None where each has its own (`vllm.share_device`)."""
    return Turn(settings.run.folder / "device.turn") if settings.vllm.share_device else None
