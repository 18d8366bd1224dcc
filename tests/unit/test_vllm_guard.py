"""A server and its workers end with the service that started them, even when it is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inference.engines.vllm import command

SERVER = """
import pathlib, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(worker.pid))
time.sleep(600)
"""
SERVICE = """
import os, subprocess, sys, time
guard = subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), sys.executable, *sys.argv[2:]],
                         start_new_session=True)
time.sleep(600)
"""


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends while it is read
        return False
    return state != "Z"


@pytest.mark.parametrize("victim", ["service", "server"])
def test_workers_end_when_the_service_or_the_server_is_killed(tmp_path: Path, victim: str) -> None:
    guard, script, noted = command.HERE / "guard.py", tmp_path / "server.py", tmp_path / "worker.pid"
    script.write_text(SERVER)
    line = [sys.executable, "-c", SERVICE, str(guard), str(script), str(noted)]
    service = subprocess.Popen(line)
    try:
        _wait(lambda: noted.exists() and noted.read_text() != "", "the worker has started")
        worker = int(noted.read_text())
        server = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(service.pid if victim == "service" else server, signal.SIGKILL)
        _wait(lambda: not _is_alive(worker) and not _is_alive(server), "server and worker have ended")
    finally:
        service.kill()
        service.wait(10)
