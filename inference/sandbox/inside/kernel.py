"""The system calls that Python 3.11 does not offer, with errors as OSError."""

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

_MS_NOSUID_NODEV = 2 | 4
_CAPABILITIES_V3 = 0x20080522
_EINVAL = 22

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave the namespaces in `flags`; a new pid namespace is for children."""
    _check(_libc.unshare(flags), "unshare")


def mount_tmpfs(path: str, max_bytes: int, max_files: int) -> None:
    """An empty file system in memory at `path`, writable by all."""
    options = f"size={max_bytes},nr_inodes={max_files},mode=1777".encode()
    _check(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", _MS_NOSUID_NODEV, options), f"mount {path}")


def prctl(option: int, argument: int | ctypes.c_void_p, extra: ctypes.c_void_p | None = None) -> None:
    """`prctl(option, argument, extra, 0, 0)`."""
    first = ctypes.c_ulong(argument) if isinstance(argument, int) else argument
    _check(_libc.prctl(option, first, extra, ctypes.c_ulong(0), ctypes.c_ulong(0)), f"prctl {option}")


def drop_capabilities() -> None:
    """No capability is left, and no program that is executed gets one."""
    for number in range(64):
        try:
            prctl(PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno != _EINVAL:  # the kernel has no more of them
                raise
            break


def clear_capabilities() -> None:
    """What this process holds itself, after which it cannot change its bounding set either."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
