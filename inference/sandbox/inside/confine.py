"""Taking everything from a process before it runs code that nobody trusts."""

import fcntl
import os
import resource
import signal
from typing import TypedDict

from inference.sandbox.inside import kernel, seccomp

TMP = "/tmp"  # noqa: S108  (a mount point in the sandbox)
_HIGH = 64
"""Descriptors are moved up here before they are put in their places."""

_MAX_FILES_IN_TMP = 4096


class Limits(TypedDict):
    """Limits of one program; `schemas` of the host side is `inference.sandbox.limits.Limits`."""

    wall_s: float
    cpu_s: int
    memory_bytes: int
    tmp_bytes: int
    output_bytes: int
    processes: int
    open_files: int


def private_tmp(max_bytes: int) -> None:
    """An empty /tmp that only this process and its children see, and that vanishes with them."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount_tmpfs(TMP, max_bytes, _MAX_FILES_IN_TMP)
    os.chdir(TMP)


def keep_only(*descriptors: int) -> None:
    """Descriptor i of the result is `descriptors[i]`; all others are closed."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in descriptors]
    for place, descriptor in enumerate(high):
        os.dup2(descriptor, place)
    os.closerange(len(high), 4096)


def confine(limits: Limits, uid: int) -> None:
    """Limits, another user (where `uid` is not 0), no capability, no way back, filtered system calls.

    `uid` 0 is for a sandbox that an ordinary user started: it has no other user, and that one has no rights here.
    """
    os.setsid()
    _limit(limits, margin=0 if uid else 8)
    kernel.drop_capabilities()
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel.clear_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install()


def _limit(limits: Limits, margin: int) -> None:
    """`margin`: the sandbox's own processes, where they count as the same user's."""
    for kind, value in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["tmp_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"] + margin),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(kind, (value, value))
