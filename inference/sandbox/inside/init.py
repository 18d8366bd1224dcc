"""The first process of a job's pid namespace, and the program that it starts."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from inference.sandbox.inside import kernel
from inference.sandbox.inside.candidate import run_candidate, run_script
from inference.sandbox.inside.checker import check
from inference.sandbox.inside.confine import confine, keep_only, private_tmp
from inference.sandbox.inside.frames import pair, send

_CONFINED = b"1"

Streams = tuple[int, int, int]
"""Standard input, output and error of the program."""


def first_process(job: dict[str, Any], uid: int, report: int, streams: Streams) -> Callable[[], None]:
    """Start the program, then check it or wait for it. Returns in the program's process only, with the program."""
    channel, channel_child = pair()
    ready, ready_child = os.pipe()
    if job["graded"]:
        kernel.unshare(kernel.CLONE_NEWPID)  # the program sees no process but its own
    pid = os.fork()
    if pid == 0:
        return _program(job, uid, (*streams, channel_child, ready_child))
    nothing = os.open(os.devnull, os.O_RDWR)
    keep_only(nothing, nothing, nothing, report, channel, ready)
    reports = socket.socket(fileno=3)
    fault = _confined(job, uid, ready=5)
    if fault:
        send(reports, {"fault": fault})
    elif job["graded"]:
        check(reports, socket.socket(fileno=4), job["entry_point"])
    else:
        send(reports, {"status": _wait(pid)})
    os._exit(0)


def _confined(job: dict[str, Any], uid: int, ready: int) -> str | None:
    """Confine this process too, and learn whether the program's process is confined; else why not."""
    confine(job["limits"], uid and uid + 1)
    said = b""
    while part := os.read(ready, 4096):
        said += part
    return None if said == _CONFINED else f"the program could not be confined: {said.decode(errors='replace')}"


def _program(job: dict[str, Any], uid: int, descriptors: tuple[int, ...]) -> Callable[[], None]:
    """Become the program's process: 0, 1, 2, and 3 to its checker."""
    ready = descriptors[-1]
    try:
        private_tmp(job["limits"]["tmp_bytes"])
        keep_only(*descriptors)
        ready = len(descriptors) - 1
        confine(job["limits"], uid)
        _reset_signals()
        os.write(ready, _CONFINED)
        os.close(ready)
    except BaseException as error:  # whatever it is, the program must not run
        os.write(ready, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    if job["graded"]:
        return lambda: run_candidate(job["source"], job["entry_point"])
    os.close(3)
    return lambda: run_script(job["source"])


def _reset_signals() -> None:
    """As a program that was started by a shell has them."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.setrecursionlimit(1000)


def _wait(pid: int) -> int:
    """The program's exit code, negative for a signal; reaps what it left to us meanwhile."""
    while True:
        child, status = os.wait()
        if child == pid:
            return os.waitstatus_to_exitcode(status)
