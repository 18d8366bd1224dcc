"""The command line of a sandbox, and whether this machine can run it."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from inference.sandbox import inside
from inference.sandbox.inside.frames import FrameError
from inference.workers import Child, spawn
from schemas.errors import SettingsError

INSTALL = "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap), or leave out families that run code"

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_HOME = "/lagoon"
_PACKAGE = "inference/sandbox/inside"
_NEEDED = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL")
_ALL_USERS = 1 << 32
_FIRST_UID = 1 << 30
"""Users from here on are nobody's; each sandbox of each process has two."""

_BOOT = (
    f"import sys; sys.path.append({_HOME!r}); from inference.sandbox.inside.zygote import main; main(int(sys.argv[1]))"
)
_SHELL = 'echo 1000 > /proc/self/oom_score_adj; exec "$@"'
"""When memory runs out on this machine, the kernel shall look for it here first."""


def start(number: int) -> Child:
    """Start sandbox `number` of this process and wait until it takes jobs.

    Raises:
        SettingsError: it does not start; the message says why.
    """
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}  # noqa: S108
    with tempfile.TemporaryFile() as stderr:
        try:
            return spawn(["/bin/sh", "-c", _SHELL, "sh", *command(number)], environment, stderr)
        except (OSError, EOFError, FrameError) as error:
            stderr.seek(0)
            said = stderr.read(2000).decode(errors="replace").strip().splitlines()
            raise SettingsError(
                f"the sandbox for code does not start: {said[-1] if said else error}; it needs new namespaces: as "
                "root, or as a user where the kernel lets users have them"
            ) from error


def command(number: int) -> list[str]:
    """The command line of sandbox `number`.

    Raises:
        SettingsError: bubblewrap is missing.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SettingsError(f"bwrap, the sandbox for code, is not on the PATH; {INSTALL}")
    uid = _FIRST_UID + os.getpid() * 64 + number * 2 if _is_root() else 0
    python = Path(sys.executable).resolve()
    return [
        bwrap,
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *(() if uid else ("--unshare-user", "--uid", "0", "--gid", "0")),
        *("--die-with-parent", "--new-session", "--hostname", "sandbox"),
        *("--cap-drop", "ALL", *(word for name in _NEEDED for word in ("--cap-add", name))),
        *(word for path in _SYSTEM for word in _mounted(path)),
        *(
            word
            for path in _parents(sys.base_prefix, f"{_HOME}/{_PACKAGE}", "/dev/null")
            for word in _open_folder(path)
        ),
        *(() if python.is_relative_to("/usr") else ("--ro-bind", sys.base_prefix, sys.base_prefix)),
        *("--ro-bind", str(Path(inside.__file__).parent), f"{_HOME}/{_PACKAGE}"),
        *(word for path in _DEVICES for word in ("--dev-bind", path, path)),
        *("--dir", "/tmp", "--remount-ro", "/", "--chdir", "/"),  # noqa: S108
        *("--", str(python), "-s", "-S", "-B", "-P", "-X", "utf8", "-c", _BOOT, str(uid)),
    ]


def _parents(*paths: str) -> list[str]:
    """The folders above `paths`, outermost first, but for those that come with the system."""
    found = {str(parent) for path in paths for parent in Path(path).parents}
    return sorted(path for path in found if path != "/" and not path.startswith(_SYSTEM))


def _open_folder(path: str) -> tuple[str, ...]:
    """Arguments that make the folder `path`. Those that bubblewrap makes by itself are for root alone."""
    return ("--perms", "0755", "--dir", path)


def _mounted(path: str) -> tuple[str, ...]:
    """Arguments that show `path` of the host, read-only; a link stays a link."""
    if os.path.islink(path):
        return ("--symlink", os.readlink(path), path)
    return ("--ro-bind-try", path, path)


def _is_root() -> bool:
    """Whether this process may take any user's number, which root of a container often may not."""
    ranges = Path("/proc/self/uid_map").read_text().split()
    return os.geteuid() == 0 and ranges[:2] == ["0", "0"] and int(ranges[2]) >= _ALL_USERS - 1
