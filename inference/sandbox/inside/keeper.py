"""The keeper of one job: starts its process tree, watches the clock, collects, answers. Trusted, and out of reach."""

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from inference.sandbox.inside import kernel
from inference.sandbox.inside.confine import Limits
from inference.sandbox.inside.frames import pair, receive, send, split
from inference.sandbox.inside.init import first_process

MAX_REPORT_BYTES = 1 << 20
"""What a checker may report in all."""


@dataclass(slots=True)
class Collected:
    """What came out of a job: bytes by descriptor, bounded; the rest is read and dropped."""

    parts: dict[int, bytearray] = field(default_factory=dict)
    dropped: int = 0

    def read(self, descriptor: int, max_bytes: int) -> bool:
        """Take what there is; False at the end of the stream."""
        data = os.read(descriptor, 1 << 16)
        kept = self.parts.setdefault(descriptor, bytearray())
        room = max_bytes - len(kept)
        kept += data[:room]
        self.dropped += max(0, len(data) - room)
        return bool(data)

    def text(self, descriptor: int) -> str:
        """What came, one character a byte."""
        return self.parts.get(descriptor, b"").decode("latin-1")


def keep(control: socket.socket, uid: int) -> Callable[[], None]:
    """Run the job that waits in `control` and answer it. Returns in the program's process only, with the program."""
    job = receive(control)
    report, report_child = pair()
    (stdout, stdout_child), (stderr, stderr_child) = os.pipe(), os.pipe()
    stdin = os.memfd_create("stdin")
    os.write(stdin, job["stdin"].encode("latin-1"))
    os.lseek(stdin, 0, os.SEEK_SET)
    kernel.unshare(kernel.CLONE_NEWPID)
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        control.detach()
        return first_process(job, uid, report_child, (stdin, stdout_child, stderr_child))
    for descriptor in (report_child, stdout_child, stderr_child):
        os.close(descriptor)
    deadline = begun + job["limits"]["wall_s"]
    _hand_over(control, job, report, deadline)
    collected, timed_out = _collect(report, (stdout, stderr), job["limits"], deadline)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _drain(collected, (stdout, stderr), job["limits"]["output_bytes"])
    send(control, _answer(collected, report, (stdout, stderr), timed_out) | {"wall_s": time.monotonic() - begun})
    os._exit(0)


def _hand_over(control: socket.socket, job: dict[str, Any], report: int, deadline: float) -> None:
    """Give the tests to the checker. They come after the program was forked, so its memory never held them."""
    if job["graded"]:
        tests = receive(control)
        stream = socket.socket(fileno=os.dup(report))
        stream.settimeout(max(0.01, deadline - time.monotonic()))
        with stream, suppress(OSError):  # the checker is gone, or out of time: the missing verdicts say so
            send(stream, tests)


def _collect(report: int, outputs: tuple[int, int], limits: Limits, deadline: float) -> tuple[Collected, bool]:
    """Read until the first process has ended or the time is up; True for the latter."""
    collected = Collected()
    with selectors.DefaultSelector() as selector:
        for stream in (report, *outputs):
            selector.register(stream, selectors.EVENT_READ)
        while report in {key.fd for key in selector.get_map().values()}:
            left = deadline - time.monotonic()
            if left <= 0:
                return collected, True
            for key, _ in selector.select(left):
                bound = MAX_REPORT_BYTES if key.fd == report else limits["output_bytes"]
                if not collected.read(key.fd, bound):
                    selector.unregister(key.fd)
    return collected, False


def _drain(collected: Collected, outputs: tuple[int, int], max_bytes: int) -> None:
    """What is left in the pipes, which nobody can write to any more."""
    for descriptor in outputs:
        while collected.read(descriptor, max_bytes):
            pass


def _answer(collected: Collected, report: int, outputs: tuple[int, int], timed_out: bool) -> dict[str, Any]:
    return {
        "timed_out": timed_out,
        "reports": split(bytes(collected.parts.get(report, b""))),
        "stdout": collected.text(outputs[0]),
        "stderr": collected.text(outputs[1]),
        "dropped_bytes": collected.dropped,
    }
