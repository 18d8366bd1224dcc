"""A small parent of one program, after which nothing of it is left.

    python -IS reaper.py COMMAND ...

It begins with the first byte of its standard input, a pipe, and ends with the program or with the pipe: when whoever
holds it closes it, or is gone. Whatever a descendant did to be on its own (a session, another parent), it is killed
too. Run as a file, on Python's own library alone, so that it starts quickly.
"""

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(command: list[str]) -> int:
    """Run `command`; returns its exit code, 128 and the signal's number if one ended it."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl: orphans cannot be adopted here")
    if not os.read(0, 1):
        return 1
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    program = os.posix_spawnp(
        command[0],
        command,
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setpgroup=0,  # `kill 0` is for the program and those it has started
        setsigdef=[signal.SIGPIPE, *_ENDING],
    )
    try:
        select.select([0, os.pidfd_open(program)], [], [])
    finally:
        code = _end_all(program)
    return code


def _end_all(program: int) -> int:
    """Kill and wait until no descendant is left: those of a process that is waited for become this one's children."""
    code = 0
    while True:
        for child in _children():
            with suppress(PermissionError):  # of another user, by sudo; it is waited for
                os.kill(child, signal.SIGKILL)
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return code if code >= 0 else 128 - code
        if pid == program:
            code = os.waitstatus_to_exitcode(status)


def _children() -> list[int]:
    """Nobody else waits for them, so their numbers stay theirs."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = entry.read_text(errors="replace").rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):  # a process of others, gone since
            continue
        if int(parent) == os.getpid():
            found.append(int(entry.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
