"""Processes that die and come back: a supervised cluster of equals, and waits that name what they wait for."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from infra import failpoints
from infra.stack.ports import free_port
from infra.stack.programs import ROOT
from schemas.errors import DeadlineError

END_S = 20.0
DRAIN_S = 60.0


class Fleet:
    """One command as `size` processes: more than one are a Bytewax cluster, of which all end when one dies."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        size: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._log, self.size = [*command], log, size
        self._environment = dict(environment or {})
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, failpoint: str = "", on: int = 0) -> None:
        """Start all; process `on` dies at `failpoint` ("name=probability") if one is given."""
        addresses = ";".join(f"127.0.0.1:{free_port()}" for _ in range(self.size))
        for index in range(self.size):
            shared = {"BYTEWAX_ADDRESSES": addresses, "BYTEWAX_PROCESS_ID": str(index)} if self.size > 1 else {}
            points = {failpoints.ENVIRONMENT: failpoint if index == on else ""}
            base = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            with open(self._log, "ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *self._command],
                        cwd=ROOT,
                        env=base | {"OMP_NUM_THREADS": "1"} | self._environment | shared | points,
                        stdout=log,
                        stderr=log,
                    )
                )

    @property
    def is_whole(self) -> bool:
        """Whether all processes live."""
        return bool(self.processes) and all(p.poll() is None for p in self.processes)

    def kill_one(self) -> None:
        """Kill -9 one of them, at random."""
        random.choice(self.processes).kill()

    def bury(self) -> None:
        """After a kill: the others have END_S to end by themselves, which is what a cluster has to do.

        Raises:
            AssertionError: none was killed; what ended did so for a reason of its own.
            DeadlineError: the others live on.
        """
        if not waited(lambda: any(p.poll() == -signal.SIGKILL for p in self.processes), END_S):
            codes = [p.poll() for p in self.processes]
            raise AssertionError(f"{self._command} ended by itself, with {codes}; log: {self._log}")
        if not waited(lambda: all(p.poll() is not None for p in self.processes), END_S):
            self.kill()
            raise DeadlineError(f"the others of {self._command} have not ended within {END_S:g} s; log: {self._log}")
        self.processes = []

    def stop(self) -> None:
        """SIGTERM to all, and wait; they have to end with 0."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(DRAIN_S + END_S) for process in self.processes]
        self.processes = []
        if any(codes):
            raise AssertionError(f"{self._command} ended with {codes} when asked to end; log: {self._log}")

    def kill(self) -> None:
        """End whatever is left, at once."""
        for process in self.processes:
            process.kill()
            process.wait(END_S)
        self.processes = []


def waited(condition: Callable[[], bool], timeout_s: float, every_s: float = 0.2) -> bool:
    """Whether `condition` came true within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def wait(condition: Callable[[], bool], timeout_s: float, what: str, every_s: float = 0.2) -> None:
    """Wait for `condition`.

    Raises:
        DeadlineError: it has not come true within `timeout_s`.
    """
    if not waited(condition, timeout_s, every_s):
        raise DeadlineError(f"waited {timeout_s:g} s for {what}; giving up")
