"""Playing one attempt, and what must hold after it."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inference.sandbox.limits import MIB, Limits, Verdict
from inference.sandbox.sandbox import Sandbox
from tests.escape.attempts import HONEST, LISTENER, SECRET, TESTS

LIMITS = Limits(wall_s=2, cpu_s=2, memory_bytes=256 * MIB)
PATIENT = Limits(wall_s=30)


async def play(sandbox: Sandbox, source: str, limits: Limits = LIMITS) -> tuple[float, dict[str, Verdict]]:
    """The reward that `source` earns, and the verdicts."""
    verdicts = dict(await sandbox.grade(source, "double", TESTS, limits=limits))
    return float(len(verdicts) == len(TESTS) and all(v.passed for v in verdicts.values())), verdicts


async def serves_on(sandbox: Sandbox) -> bool:
    """Whether the next program finds a clean sandbox and is paid for being right."""
    return (await play(sandbox, HONEST, PATIENT))[0] == 1.0


def descendants(parent: int) -> list[int]:
    """Processes of this machine that stem from `parent`."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    found = [parent]
    for pid in found:
        found += [child for child, its in parents.items() if its == pid]
    return found[1:]


def succeeds_outside(source: str, folder: Path) -> bool:
    """Whether `source` wins in a bare interpreter in `folder`."""
    code = f"{source}\nassert [double(x) for x in (3, 5, 21)] == [6, 10, 42]"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, check=False, timeout=60).returncode == 0


@contextmanager
def host() -> Iterator[None]:
    """Something to steal: a variable, and a socket that listens."""
    os.environ[SECRET] = "1"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{LISTENER}")
        listener.listen(64)
        yield
    del os.environ[SECRET]
