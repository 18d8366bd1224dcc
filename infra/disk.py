"""A full disk in words: which one, how much is left, what to do."""

import errno
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import LagoonError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_SAID = ("No space left on device", "disk is full", "Disk quota exceeded")

LEAST_BYTES = 64 * 1024
"""Below this a disk counts as full: writers in C++ say only that a write failed, and leave what they had written."""


def is_full(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, says that a disk or a quota is full."""
    while error is not None:
        if getattr(error, "errno", None) in _FULL or any(words in str(error) for words in _SAID):
            return True
        error = error.__cause__ or error.__context__
    return False


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written under `folder`, which need not exist yet."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    return shutil.disk_usage(existing).free


def full(folder: Path) -> str:
    """That the disk under `folder` is full, and what to do."""
    return f"the disk that holds {folder} is full ({free_bytes(folder):,} bytes free); make room on it, or enlarge it"


@contextmanager
def room(folder: Path, what: str) -> Generator[None]:
    """Name the disk where writing `what` under `folder` fails for lack of room.

    Raises:
        LagoonError: in place of whatever was raised inside, panics of Rust included, if the disk is full.
    """
    try:
        yield
    except (LagoonError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if not is_full(error) and free_bytes(folder) >= LEAST_BYTES:
            raise
        first = (str(error).splitlines() or [""])[0][:300]
        raise LagoonError(f"{what} cannot be written: {full(folder)} ({type(error).__name__}: {first})") from error
