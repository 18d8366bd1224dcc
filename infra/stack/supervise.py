"""The supervisor of a data folder: one supervisord, which restarts whatever dies.

It runs in a session of its own, outlives the command that started it, and is asked over a Unix socket (XML-RPC).
Each program is a file in `<data_dir>/stack/programs`; a changed file means that the program is restarted.
"""

import hashlib
import http.client
import os
import signal
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor.xmlrpc import Faults

from infra.stack import supervisord
from infra.stack.programs import Program
from schemas.errors import DeadlineError, StackError

MARK = "LAGOON_STACK"
"""Environment variable by which a stack knows its own processes again if their supervisor was killed."""

PROGRAM_MARK = "LAGOON_PROGRAM"
"""Environment variable that says which of the stack's programs a process belongs to."""

_UP = ("running", "starting", "backoff")

MAX_SOCKET_PATH = 100  # the kernel's limit is 107 bytes; supervisord appends its pid while it binds

TEMPORARY = Path("/tmp")  # noqa: S108 - not $TMPDIR, which differs between the commands of one stack


@dataclass(frozen=True, slots=True)
class State:
    """What the supervisor says of a program; `name` is supervisord's word, for example running or backoff."""

    program: str
    name: str
    pid: int
    age_s: int
    exit_status: int
    log: Path

    @property
    def is_up(self) -> bool:
        """Running, or on its way."""
        return self.name in _UP

    @property
    def is_finished(self) -> bool:
        """Ended by itself, with success."""
        return self.name == "exited" and not self.exit_status


class Supervisor:
    """Starts, stops and asks after the programs of one data folder, the same by whichever path it is named."""

    def __init__(self, data_dir: str | Path) -> None:
        self.data_dir = Path(os.path.realpath(data_dir))
        self.folder = self.data_dir / "stack"

    def start(self, programs: Sequence[Program]) -> None:
        """Start those of `programs` that are not up, restart those that changed; returns without waiting for them.

        Raises:
            StackError: supervisord does not start, or refuses a program.
        """
        for program in programs:
            program.log.parent.mkdir(parents=True, exist_ok=True)
            marks = {MARK: str(self.data_dir), PROGRAM_MARK: program.name}
            _write(self._file(program.name), supervisord.program(program, marks))
        self.launch()
        self._reread()
        names = [p.name for p in programs]
        self._wait(lambda: not self._in(names, "stopping"), 120, f"{', '.join(names)} to stop first")
        up = {s.program for s in self.states() if s.is_up}
        for name in names:
            if name not in up:
                self._call("startProcess", name, False, unless=Faults.ALREADY_STARTED)

    def stop(self, names: Sequence[str], timeout_s: float) -> None:
        """Stop programs, all at once; each gets SIGTERM, then SIGKILL after its own limit.

        Raises:
            DeadlineError: one is still there after `timeout_s`.
        """
        for state in self.states():
            if state.program in names and state.is_up:
                self._call("stopProcess", state.program, False, unless=Faults.NOT_RUNNING)
        self._wait(lambda: not self._in(names, *_UP, "stopping"), timeout_s, f"{', '.join(names)} to stop")

    def forget(self, names: Sequence[str]) -> None:
        """Take stopped programs out of the supervisor's books."""
        for name in names:
            self._file(name).unlink(missing_ok=True)
        self._reread()

    def restart(self, name: str, timeout_s: float = 60) -> None:
        """Stop one program and start it again."""
        self.stop([name], timeout_s)
        self._call("startProcess", str(name), False, unless=Faults.ALREADY_STARTED)

    def kill(self, name: str) -> None:
        """Kill -9 one program, which is then started again."""
        self._call("signalProcess", name, "KILL", unless=Faults.NOT_RUNNING)

    def states(self) -> list[State]:
        """Every program that the supervisor knows; none when there is no supervisor."""
        return [_state(info) for info in self._call("getAllProcessInfo")] if self.is_running() else []

    def started(self) -> list[str]:
        """Names of the programs that were started here and not forgotten since, also without a supervisor."""
        return sorted(file.stem for file in self._file("*").parent.glob("*.conf"))

    def is_running(self) -> bool:
        """Whether the supervisor answers, and is not about to end."""
        return self._answer() == "running"

    def shutdown(self, timeout_s: float) -> None:
        """Stop all programs and the supervisor itself, then whatever a killed supervisor left behind.

        Raises:
            DeadlineError: something is still there after `timeout_s`.
        """
        if answer := self._answer():
            if answer == "running":
                self._call("shutdown", unless=Faults.SHUTDOWN_STATE)
            self._let_end(timeout_s)
        self._end_orphans()

    def launch(self) -> None:
        """Start the supervisor itself where it is not running, after ending what a killed one left behind.

        Raises:
            StackError: supervisord does not start.
            DeadlineError: one that was asked to end is still there after two minutes.
        """
        if self.is_running():
            return
        if self._answer():
            self._let_end(120)
        self._end_orphans()
        Path(self.socket_path()).parent.mkdir(0o700, parents=True, exist_ok=True)
        _write(self.folder / "supervisord.conf", supervisord.main(self.folder, self.socket_path()))
        command = [sys.executable, "-m", "supervisor.supervisord", "-c", str(self.folder / "supervisord.conf")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=self.folder)
        if done.returncode:
            raise StackError(f"supervisord did not start:\n{(done.stdout + done.stderr).strip()[-1500:]}")
        self._wait(self.is_running, 20, "the supervisor to answer")

    def _answer(self) -> str:
        """What the supervisor says of itself: running, ending, or nothing where none is there."""
        try:
            self._rpc().supervisor.getState()
        except xmlrpc.client.Fault:  # SHUTDOWN_STATE, whatever it is asked
            return "ending"
        except (OSError, http.client.HTTPException):
            return ""
        return "running"

    def _let_end(self, timeout_s: float) -> None:
        """Wait for a supervisor that was asked to end; it stops its programs first."""
        self._wait(lambda: not (self.folder / "supervisord.pid").exists(), timeout_s, "the supervisor to end")

    def _reread(self) -> None:
        added, changed, removed = self._call("reloadConfig")[0]
        self.stop([*changed, *removed], timeout_s=120)
        for name in [*changed, *removed]:
            self._call("removeProcessGroup", name)
        for name in [*added, *changed]:
            self._call("addProcessGroup", name)

    def _in(self, names: Sequence[str], *states: str) -> list[str]:
        return [s.program for s in self.states() if s.program in names and s.name in states]

    def _end_orphans(self) -> None:
        """End processes of this stack that no supervisor looks after: they hold its ports."""
        for send in (signal.SIGTERM, signal.SIGKILL):
            for pid in marked(str(self.data_dir)):
                with suppress(ProcessLookupError):
                    os.kill(pid, send)
            try:
                self._wait(lambda: not marked(str(self.data_dir)), 20, "processes left by a killed supervisor to end")
            except DeadlineError:
                if send == signal.SIGKILL:
                    raise

    def _file(self, name: str) -> Path:
        return self.folder / "programs" / f"{name}.conf"

    def socket_path(self) -> str:
        """The socket's path; where the data folder's is too long for one, in a private folder under TEMPORARY.

        It follows from the data folder alone: a copy of the folder is another stack.

        Raises:
            StackError: that private folder belongs to somebody else.
        """
        path = self.folder / "supervisor.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return str(path)
        name = hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:16]
        folder = TEMPORARY / f"lagoon-{os.getuid()}-{name}"
        if folder.exists() and folder.stat().st_uid != os.getuid():
            raise StackError(f"{folder} belongs to another user; remove it, or take a shorter path as run.data_dir")
        return str(folder / "supervisor.sock")

    def _rpc(self) -> Any:
        return supervisord.connect(self.socket_path())

    def _call(self, method: str, *arguments: Any, unless: int | None = None) -> Any:
        try:
            return getattr(self._rpc().supervisor, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode == unless:  # the program was quicker than we
                return None
            raise StackError(f"supervisor: {method}{arguments}: {fault.faultString}") from fault
        except (OSError, http.client.HTTPException) as error:
            raise StackError(f"the supervisor of {self.data_dir} does not answer ({error}); run `lagoon up`") from error

    @staticmethod
    def _wait(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise DeadlineError(f"waited {timeout_s:g} s for {what}; giving up")
            time.sleep(0.1)


def marked(stack: str, program: str = "") -> list[int]:
    """Pids of other processes that a supervisor of `stack` started (for `program`), by their environment (Linux)."""
    wanted = {f"{MARK}={stack}".encode(), *([f"{PROGRAM_MARK}={program}".encode()] if program else [])}
    pids: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted <= {*(entry / "environ").read_bytes().split(b"\0")} and int(entry.name) != os.getpid():
                pids.append(int(entry.name))
        except OSError:  # gone already, or another user's
            continue
    return pids


def _state(info: dict[str, Any]) -> State:
    since = info["start"] if info["pid"] else info["stop"] or info["now"]
    age_s = max(info["now"] - since, 0)
    return State(
        info["group"], info["statename"].lower(), info["pid"], age_s, info["exitstatus"], Path(info["stdout_logfile"])
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
