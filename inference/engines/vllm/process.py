"""The server process of an engine: started, watched, ended with whoever started it."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from inference.engines.base import EngineError
from inference.engines.vllm import command
from infra.stack.ports import HOST, free_port
from schemas.settings import Vllm

_END_S = 10.0
_TAIL = 300


class LocalServer:
    """At most one vLLM server, on a free port of the loopback address. It ends with this process, however that ends."""

    def __init__(self, settings: Vllm, log: Path, *, max_tokens: int, threads: int) -> None:
        self._settings, self._log = settings, log
        self._max_tokens, self._threads = max_tokens, threads
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def fault(self) -> str:
        """Why a server that was started no longer runs; empty when one runs or none was started."""
        if self._guard is None or self.running:
            return ""
        return f"the vLLM server ended; {self._log} says at its end: {self._tail()}"

    def start(self, folder: Path) -> str:
        """Start a server with the weights of `folder`, which is not up yet; returns its address.

        Raises:
            EngineError: there is no such interpreter.
        """
        self.stop()
        port = free_port()
        line = command.command(self._settings, folder.absolute(), port, self._max_tokens)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            try:
                self._guard = subprocess.Popen(
                    [line[0], str(command.HERE / "guard.py"), str(os.getpid()), *line],
                    env=command.environment(self._settings, self._threads),
                    cwd=self._log.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(
                    f"cannot start {line[0]}: {error.strerror}; install vLLM with `make vllm`, or set "
                    "vllm.python to an interpreter that has it"
                ) from error
        return f"http://{HOST}:{port}"

    def stop(self) -> None:
        """End the server and all of its workers; safe to repeat."""
        if self._guard is None:
            return
        guard, self._guard = self._guard, None
        guard.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)  # also when the guard itself was killed
        guard.wait()

    def _tail(self) -> str:
        with open(self._log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
            return log.read().decode(errors="replace").strip()
