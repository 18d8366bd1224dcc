"""A lock on a file, for the processes of one machine; the kernel frees that of one that dies."""

import fcntl
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import LagoonError

_LOOK_S = 0.1


@contextmanager
def locked(path: Path, wait_s: float, late: LagoonError, on_wait: Callable[[], None] = lambda: None) -> Generator[None]:
    """Hold the lock on the file `path` while inside; `on_wait` is called once if another process has it.

    Raises:
        LagoonError: `late`, where another process has had it for `wait_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline, told = time.monotonic() + wait_s, False
    with open(path, "a") as file:
        while not taken(file.fileno()):
            if time.monotonic() >= deadline:
                raise late
            if not told:
                on_wait()
            told = True
            time.sleep(_LOOK_S)
        yield


def taken(descriptor: int) -> bool:
    """Take the lock on an open file, unless another process has it; true if it is held now. Never waits."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
