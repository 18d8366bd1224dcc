"""The warden, `python -m infra.warden`: kills processes that hang, so that the supervisor starts them again.

The supervisor notices a process that has ended, not one that stands still: stopped, swapped out, or stuck where it
holds the interpreter. Such a process leaves `/healthz` unanswered. Killing one is safe at any time: that is what
recovery stores, outboxes and checkpoints are for. Kafka and MLflow are not looked after.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import Counter as Metric

from infra.logs import logger
from infra.stack import health, programs
from infra.stack.supervise import State, Supervisor
from infra.telemetry import Stop, Telemetry, main
from schemas.names import Service
from schemas.settings import Settings

KILLED = Metric("lagoon_hung_processes", "Processes that were killed because they hung", ["program"])

_LOOK_EVERY_S = 1.0
_ASKED_AT_ONCE = 16
_LONGEST_LOOK_S = 5.0
"""Counted of the time between two looks: while this process stands still itself, it can blame nobody."""


class Warden:
    """Counts for how long each process has been silent, and kills it at the limit."""

    def __init__(
        self, limit_s: float, is_silent: Callable[[State], bool], kill: Callable[[str], None], now: float
    ) -> None:
        """`kill` takes the name of a program; `now` is monotonic, in seconds, here and below."""
        self.killed = Counter[str]()
        self._limit_s, self._is_silent, self._kill = limit_s, is_silent, kill
        self._askers = ThreadPoolExecutor(_ASKED_AT_ONCE)
        self._looked_at = now
        self._silent_s: dict[tuple[str, int], float] = {}

    def look(self, states: Iterable[State], now: float) -> tuple[bool, str]:
        """Look at every running process once, and kill what hangs; whether all is well, and what is to be known."""
        passed_s, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_S), now
        others = (*programs.SERVERS, Service.WARDEN)
        running = [s for s in states if s.name == "running" and s.program not in others]
        answers = self._askers.map(self._is_silent, running)
        silent = [(s.program, s.pid) for s, is_silent in zip(running, answers, strict=True) if is_silent]
        self._silent_s = {key: self._silent_s.get(key, -passed_s) + passed_s for key in silent}
        for program, pid in [key for key, silent_s in self._silent_s.items() if silent_s >= self._limit_s]:
            del self._silent_s[program, pid]
            self._end(program, pid)
        return not self._silent_s, self._in_words(len(running))

    def _end(self, program: str, pid: int) -> None:
        logger(Service.WARDEN).error("hung, killed", program=program, pid=pid, unanswered_s=self._limit_s)
        self._kill(program)
        self.killed[program] += 1
        KILLED.labels(program).inc()

    def _in_words(self, num_running: int) -> str:
        if self._silent_s:
            decision = f"; after {self._limit_s:g} s it is killed and started again"
            return "; ".join(f"{program}: process {pid} does not answer{decision}" for program, pid in self._silent_s)
        killed = ", ".join(f"{program} ({times})" for program, times in self.killed.items())
        return f"{num_running} processes answer" + (f"; hung and killed so far: {killed}" if killed else "")


def serve(settings: Settings, telemetry: Telemetry, stop: Stop) -> None:
    """Look at the run's processes until `stop`."""
    supervisor = Supervisor(settings.run.data_dir)
    limit_s = settings.stack.hung_timeout_s
    warden = Warden(limit_s, lambda state: health.check(settings, state).is_silent, supervisor.kill, time.monotonic())
    while not stop:
        telemetry.health(*warden.look(supervisor.states(), time.monotonic()))
        stop.wait(_LOOK_EVERY_S)


if __name__ == "__main__":
    main(Service.WARDEN, serve)
