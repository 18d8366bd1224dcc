"""The warm interpreter of a sandbox: for each job it forks a process tree that is gone before the next one.

    zygote                 waits for a job, reads nothing of it, so that no job leaves a trace in its memory
      └─ keeper            reads the job, watches the clock, collects output and reports, answers
          └─ pid 1 of a new pid namespace: the checker of a graded job, else a mere init
              └─ the program: own /tmp, no capability, no descriptor but its own;
                 of a graded job in a pid namespace of its own

When the keeper has waited for that pid 1, the kernel has ended everything in the namespace: nothing can be left over.
"""

import gc
import os
import socket
import sys
from collections.abc import Callable

from inference.sandbox.inside import kernel
from inference.sandbox.inside.frames import send
from inference.sandbox.inside.keeper import keep

PRELOADED = (
    "abc array base64 bisect collections contextlib copy dataclasses datetime decimal enum fractions functools hashlib "
    "heapq io itertools json math operator queue random re statistics string textwrap threading time traceback typing"
)
"""Modules that programs like; imported once."""

Program = Callable[[], None]


def main(uid: int) -> None:
    """Serve the jobs of the control socket, descriptor 0, until its other end closes.

    In a program's process this returns from `serve` with what to run, so that few frames of the sandbox lie below it.
    """
    for name in PRELOADED.split():
        __import__(name)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    program = serve(socket.socket(fileno=os.dup(0)), uid)
    if program is not None:
        program()


def serve(control: socket.socket, uid: int) -> Program | None:
    """Fork a keeper for each job. Returns None at the end, or, in a program's process, the program.

    A keeper that fails is the end too: what it left unread in `control` would be taken for the next job.
    """
    send(control, {"ready": sys.version})
    gc.freeze()
    while control.recv(1, socket.MSG_PEEK):
        pid = os.fork()
        if pid == 0:
            return keep(control, uid)
        if _reap(pid):
            break
    return None


def _reap(pid: int) -> int:
    """Wait for `pid`, then for whatever it may have left to us; returns its status."""
    result = 0
    while True:
        try:
            child, status = os.wait()
        except ChildProcessError:
            return result
        result = status if child == pid else result
