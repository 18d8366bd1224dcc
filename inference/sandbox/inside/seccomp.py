"""The filter of system calls, assembled by hand: a list of what is refused, everything else is let through.

It closes what namespaces leave open: tracing, new namespaces, mounts, the keyring, sockets other than Unix ones
(AF_VSOCK knows no network namespace), memory that no limit counts, and corners of the kernel with a history.
"""

import ctypes
import platform
import struct

from inference.sandbox.inside.kernel import PR_SET_SECCOMP, prctl

_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`; of the first argument the low half."""

_AF_UNIX = 1
_NAMESPACES = 0x7E020000
"""All CLONE_NEW* flags that clone takes."""

_SAME_NUMBER = (*range(424, 434), 438, 440, 442, 443, 447, 448)
"""On both: pidfd_send_signal, io_uring_*, open_tree, move_mount, fs*; pidfd_getfd, process_madvise, mount_setattr,
quotactl_fd, memfd_secret, process_mrelease."""

_DENIED = {
    # ptrace syslog acct mount umount2 pivot_root chroot swapon swapoff reboot sethostname setdomainname iopl ioperm
    # init_module delete_module quotactl settimeofday adjtimex kexec_load add_key request_key keyctl unshare
    # perf_event_open name_to_handle_at open_by_handle_at fanotify_init clock_adjtime setns process_vm_readv/writev kcmp
    # finit_module memfd_create kexec_file_load bpf userfaultfd personality modify_ldt shmget shmat shmctl semget msgget
    # mq_open clock_settime migrate_pages move_pages
    "x86_64": (
        *(101, 103, 163, 165, 166, 155, 161, 167, 168, 169, 170, 171, 172, 173, 175, 176, 179, 164, 159, 246, 248),
        *(249, 250, 272, 298, 303, 304, 300, 305, 308, 310, 311, 312, 313, 319, 320, 321, 323, 135, 154, 29, 30, 31),
        *(64, 68, 240, 227, 256, 279),
    ),
    "aarch64": (
        *(117, 116, 89, 40, 39, 41, 51, 224, 225, 142, 161, 162, 105, 106, 60, 170, 171, 104, 217, 218, 219, 97, 241),
        *(264, 265, 262, 266, 268, 270, 271, 272, 273, 279, 294, 280, 282, 92, 194, 196, 195, 190, 186, 180, 112),
        *(238, 239),
    ),
}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE3 = 435
_X32 = 0x40000000

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def program(machine: str) -> list[Instruction]:
    """The filter for `machine`, as `platform.machine()` names it."""
    deny = (_RETURN, 0, 0, _ERRNO | _EPERM)
    body: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        deny,
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),  # its flags lie in memory; the C library falls back to clone
    ]
    for number in (*_DENIED[machine], *_SAME_NUMBER):
        body += [(_EQUAL, 0, 1, number), deny]
    body += [(_EQUAL, 0, 3, _CLONE[machine]), (_LOAD, 0, 0, _ARGUMENT), (_ANY_BIT, 0, 4, _NAMESPACES), deny]
    body += [(_EQUAL, 0, 2, _SOCKET[machine]), (_LOAD, 0, 0, _ARGUMENT), (_EQUAL, 0, 1, _AF_UNIX)]
    return [*body, (_RETURN, 0, 0, _ALLOW), deny]


def install() -> None:
    """Filter this process and all that it starts, for good.

    Raises:
        OSError: the kernel has no seccomp, or the process may still gain privileges.
        KeyError: no list for this machine.
    """
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program(platform.machine()))
    instructions = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    whole = Program(len(code) // 8, ctypes.addressof(instructions))
    prctl(PR_SET_SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(whole)))
