"""Ports of the local servers: chosen once and remembered in `<data_dir>/stack.json`, so a restart keeps its address.

The file names its place, machine and folder: in a copy on the same machine servers get ports of their own. On another
machine it may be the same folder, mounted elsewhere, and no port of the first is in the way.
"""

import json
import os
import random
import socket
from pathlib import Path
from typing import Any

from infra.locks import locked
from schemas.errors import StackError

HOST = "127.0.0.1"
FIRST, LAST = 20_000, 30_000
"""Below the range that the kernel deals to outgoing connections: a client that keeps calling a dead server's port there
can be connected to itself, and then holds the port."""

_PLACE = "place"
_WAIT_S = 10
_dealt: set[int] = set()
_random = random.SystemRandom()
"""Not the seeded one: two processes with one seed would draw the same ports."""


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of the loopback address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that was free a moment ago; another one at each call, as a server may take a while to listen.

    Raises:
        StackError: none was found in a hundred draws.
    """
    for _ in range(100):
        port = _random.randrange(FIRST, LAST)
        if port not in _dealt and is_free(port):
            _dealt.add(port)
            return port
    raise StackError(f"found no free port in [{FIRST}, {LAST}); close some servers on this machine")


def remembered(data_dir: Path, name: str, wanted: int = 0) -> int:
    """The port of server `name` in this data folder: `wanted`, else the one that it had before, else a free one.

    Raises:
        StackError: `stack.json` is malformed.
    """
    had = all_of(data_dir, name)
    if had and had[0] and wanted in {0, had[0]}:
        return had[0]
    late = StackError(f"another process has been choosing ports in {data_dir} for {_WAIT_S} s; end it")
    with locked(data_dir / "stack" / "ports.lock", _WAIT_S, late):
        had = all_of(data_dir, name)  # another process may have been as quick
        port = wanted or next(iter(had), 0) or free_port()
        chosen = [port, *(p for p in had if p not in {0, port})]
        temporary = _file(data_dir).with_suffix(".tmp")
        content = _read(data_dir) | {name: chosen, _PLACE: _place(data_dir)}
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        temporary.replace(_file(data_dir))
    return port


def all_of(data_dir: Path, name: str) -> list[int]:
    """The ports that server `name` has ever had in this data folder, the present one first; saved runs name old ones.

    In a copy of the folder the first is 0, which stands for none, until the server has a port of its own there.

    Raises:
        StackError: `stack.json` is malformed.
    """
    return _read(data_dir).get(name, [])


def _file(data_dir: Path) -> Path:
    return data_dir / "stack.json"


def _place(data_dir: Path) -> list[str]:
    return [socket.gethostname(), os.path.realpath(data_dir)]


def _read(data_dir: Path) -> dict[str, list[int]]:
    path = _file(data_dir)
    try:
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        here = _place(data_dir)
        machine, folder = found.pop(_PLACE, here)
        known: dict[str, list[int]] = {name: [p] if isinstance(p, int) else p for name, p in found.items()}
        is_copy = machine == here[0] and folder != here[1]
        return {name: [0, *p] for name, p in known.items()} if is_copy else known
    except (ValueError, AttributeError, TypeError) as error:
        raise StackError(f"{path} is malformed ({error}); delete it, and the servers take new ports") from error


def require_free(name: str, port: int, setting: str) -> None:
    """Raise a StackError that names the port and the setting if something else listens there."""
    if not is_free(port):
        raise StackError(
            f"port {port} for {name} is taken by another program; stop that program, "
            f"or choose another port with --{setting}=N"
        )
