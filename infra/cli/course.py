"""The course of a whole run on this machine, for commands that are one: followed live to its end, drained, stopped."""

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager

from infra.cli import live
from infra.control import send_directive
from infra.lake import Lake
from infra.sql import Live
from infra.stack import programs
from infra.stack.bring_up import take_down
from infra.stack.supervise import Supervisor
from infra.watch import LoopState, Watch
from schemas.names import Service
from schemas.settings import Settings

STUCK_S = 120.0
NO_STEP_LIMIT_S = 1800.0
DRAIN_S = 180.0
INTERRUPTED_DRAIN_S = 20.0
INTERRUPTED = "interrupted"


@contextmanager
def interrupts() -> Generator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; a second one interrupts at once."""
    stop = threading.Event()

    def on_signal(number: int, _: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        say("ending; once more to end at once")

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Progress:
    """Since when each kind of service has made none, which tells a loop that is stuck from one that is slow.

    Where one is stuck the others come to a stop as well: no more is dispatched than the learner can use.
    """

    def __init__(self, now: float) -> None:
        self._marks: dict[str, tuple[int, float]] = {}
        self.note(LoopState(), now)

    def note(self, state: LoopState, now: float) -> None:
        """Take in that the loop has come to `state` at `now` (monotonic seconds)."""
        marks = {
            Service.ROLLOUT: state.episodes + state.tokens,
            Service.CURATE: state.outcomes.total(),
            Service.LEARNER: state.train_step + state.weight_version,
            Service.EVALUATOR: len(state.evals),
        }
        for name, mark in marks.items():
            if name not in self._marks or self._marks[name][0] != mark:
                self._marks[name] = mark, now

    def fault(self, now: float, stuck_s: float) -> str:
        """Who has made no progress for `stuck_s`, where that is everyone, or the learner for NO_STEP_LIMIT_S; or ""."""
        idle = {name: now - since for name, (_, since) in self._marks.items()}
        if min(idle.values()) <= stuck_s and idle[Service.LEARNER] <= max(stuck_s, NO_STEP_LIMIT_S):
            return ""
        still = sorted(((s, name) for name, s in idle.items() if s > stuck_s), reverse=True)
        return "no progress: " + ", ".join(f"{name} for {s:.0f} s" for s, name in still)


def follow(settings: Settings, stop: threading.Event, limit_s: float = float("inf")) -> str:
    """Show the loop until the learner has finished, or for `limit_s`; returns why it ended early, or an empty text."""
    supervisor, watch = Supervisor(settings.run.data_dir), Watch(settings)
    stuck_s = max(STUCK_S, 2 * settings.learner.watchdog_s)
    starting_s = settings.vllm.start_timeout_s if settings.rollout.engine == "vllm" else 0.0
    progress = Progress(time.monotonic() + starting_s)
    deadline = time.monotonic() + limit_s
    try:
        with live.Display(settings) as display:
            while not stop.wait(1):
                if time.monotonic() > deadline:
                    return ""
                state = watch.poll()
                display.show(state)
                progress.note(state, time.monotonic())
                learner = next((s for s in supervisor.states() if s.program == Service.LEARNER), None)
                if learner is None:
                    return f"the supervisor of {settings.run.data_dir} is gone, and the learner with it"
                if not learner.is_up:
                    return (
                        ""
                        if learner.name == "exited" and not learner.exit_status
                        else f"the learner is {learner.name}; see {learner.log}"
                    )
                if fault := progress.fault(time.monotonic(), stuck_s):
                    return f"{fault}; `lagoon status` and {learner.log} say why"
    finally:
        watch.close()
    return INTERRUPTED


def drain(settings: Settings, stop: threading.Event, by: str) -> None:
    """Open no more groups, let the open ones close, let rollouts hand over, and wait until all is in the lake."""
    deadline = time.monotonic() + (INTERRUPTED_DRAIN_S if stop.is_set() else DRAIN_S)
    send_directive(settings.kafka, target="dispatch", issued_by=by, reason=f"{by} ends", pause=True)
    with closing(Live(Lake.of(settings))) as lake:
        _until(deadline, "open groups to close", lambda: lake.ask("select open from work") == [(0,)])
        rollouts = [n for n in programs.service_names(settings) if programs.kind_of(n) == Service.ROLLOUT]
        Supervisor(settings.run.data_dir).stop(rollouts, timeout_s=settings.rollout.drain_s + 30)
        settled = "select sum(abs(in_flight)) from conservation"
        _until(deadline, "the last trajectories to reach the lake", lambda: lake.ask(settled) == [(0,)])
        judged = "select coalesce(max(version), 0) <= (select coalesce(max(end_version), 0) from evals) from weights"
        _until(deadline, "the last version to be evaluated", lambda: lake.ask(judged) == [(True,)])


def _until(deadline: float, what: str, condition: Callable[[], bool]) -> None:
    """Wait for `condition`; at the deadline say what is missing and go on: the summary shows it."""
    say(f"waiting for {what}")
    while not condition():
        if time.monotonic() > deadline:
            say(f"gave up waiting for {what}; the summary counts what is missing")
            return
        time.sleep(0.5)


def stop_services(settings: Settings, servers_stay: bool) -> None:
    """Stop the processes of the run, and the servers with them unless they are to stay."""
    if not servers_stay:
        take_down(settings.run.data_dir, say)
        return
    Supervisor(settings.run.data_dir).stop(programs.service_names(settings), timeout_s=60)


def say(line: str) -> None:
    """Tell the user, at once."""
    print(line, flush=True)
