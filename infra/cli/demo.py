"""`lagoon demo`: the whole loop on this machine, live, then a summary."""

import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from infra.cli import arguments, live, recap
from infra.control import send_directive
from infra.lake import Lake
from infra.sql import connect
from infra.stack import programs
from infra.stack.bring_up import bring_up, take_down
from infra.stack.supervise import Supervisor
from infra.summary import summarize, to_json
from infra.watch import Watch
from schemas.names import Service
from schemas.settings import Settings

PROFILE = Path(__file__).parents[1] / "profiles" / "demo.toml"
VLLM_PROFILE = PROFILE.with_name("demo-vllm.toml")
STUCK_S = 120.0
DRAIN_S = 90.0
INTERRUPTED_DRAIN_S = 20.0

SUMMARY = """\
Start everything on this machine, let a tiny policy learn to use a calculator, and prove the books: rollouts, learner
and evaluator run side by side. Ends by itself; Ctrl-C ends it early, and --resume goes on from there. The last line
names summary.json.
"""


def run(argv: Sequence[str]) -> int:
    """Run the demo; 1 if it ended early, got stuck, or the books do not balance."""
    parser = arguments.parser("demo", SUMMARY)
    parser.add_argument("--resume", action="store_true", help="go on with the current run")
    args, overrides = arguments.parse(parser, argv)
    settings = _settings(args.config, overrides, args.resume)
    started = time.monotonic()
    before = {s.program for s in Supervisor(settings.run.data_dir).states() if s.is_up}
    with _interrupts() as stop:
        try:
            settings = bring_up(settings, [], _say)
            if args.resume:
                send_directive(settings.kafka, target="dispatch", issued_by="demo", reason="demo resumes", pause=False)
            ended = _follow(settings, stop)
            _drain(settings, stop)
        finally:
            _stop(settings, before)
    summary = summarize(settings, time.monotonic() - started)
    path = settings.run.folder / "summary.json"
    path.write_text(to_json(summary) + "\n")
    recap.show(summary, ended)
    print(f"summary: {path}")
    return 0 if not ended and recap.balances(summary) else 1


def _settings(files: Sequence[str], overrides: Sequence[str], resume: bool) -> Settings:
    if resume:
        return arguments.settings_of(files, overrides, must_exist=True)
    name = f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    overrides = [f"--run.name={name}", *overrides]
    settings = arguments.settings_of([str(PROFILE), *files], overrides, must_exist=False)
    if settings.rollout.engine == "torch":
        return settings
    return arguments.settings_of([str(PROFILE), str(VLLM_PROFILE), *files], overrides, must_exist=False)


@contextmanager
def _interrupts() -> Generator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; a second one interrupts at once."""
    stop = threading.Event()

    def on_signal(number: int, _: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        _say("ending; once more to end at once")

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _follow(settings: Settings, stop: threading.Event) -> str:
    """Show the loop until the learner has finished; returns why it ended early, or an empty text."""
    supervisor, watch = Supervisor(settings.run.data_dir), Watch(settings)
    starting_s = settings.vllm.start_timeout_s if settings.rollout.engine == "vllm" else 0.0
    last_step, moved_at = 0, time.monotonic() + starting_s
    try:
        with live.Display(settings) as display:
            while not stop.wait(1):
                state = watch.poll()
                display.show(state)
                if state.train_step != last_step:
                    last_step, moved_at = state.train_step, time.monotonic()
                learner = next(s for s in supervisor.states() if s.program == Service.LEARNER)
                if not learner.is_up:
                    return (
                        ""
                        if learner.name == "exited" and not learner.exit_status
                        else f"the learner is {learner.name}; see {learner.log}"
                    )
                if time.monotonic() - moved_at > STUCK_S:
                    return f"no train step for {STUCK_S:.0f} s; `lagoon status` and {learner.log} say why"
    finally:
        watch.close()
    return "interrupted; `lagoon demo --resume` goes on"


def _drain(settings: Settings, stop: threading.Event) -> None:
    """Open no more groups, let the open ones close, let rollouts hand over, and wait until all is in the lake."""
    deadline = time.monotonic() + (INTERRUPTED_DRAIN_S if stop.is_set() else DRAIN_S)
    lake = Lake.of(settings)
    send_directive(settings.kafka, target="dispatch", issued_by="demo", reason="demo ends", pause=True)
    _until(deadline, "open groups to close", lambda: _value(lake, "select open from work") == 0)
    rollouts = [n for n in programs.service_names(settings) if programs.kind_of(n) == Service.ROLLOUT]
    Supervisor(settings.run.data_dir).stop(rollouts, timeout_s=settings.rollout.drain_s + 30)
    settled = "select sum(abs(in_flight)) from conservation"
    _until(deadline, "the last trajectories to reach the lake", lambda: _value(lake, settled) == 0)
    judged = "select coalesce(max(version), 0) <= (select coalesce(max(end_version), 0) from evals) from weights"
    _until(deadline, "the last version to be evaluated", lambda: bool(_value(lake, judged)))


def _until(deadline: float, what: str, condition: Callable[[], bool]) -> None:
    """Wait for `condition`; at the deadline say what is missing and go on: the summary shows it."""
    _say(f"waiting for {what}")
    while not condition():
        if time.monotonic() > deadline:
            _say(f"gave up waiting for {what}; the summary counts what is missing")
            return
        time.sleep(0.5)


def _stop(settings: Settings, before: set[str]) -> None:
    """Stop what the demo started; servers that ran before stay."""
    if not before:
        take_down(settings.run.data_dir, _say)
        return
    services = programs.service_names(settings)
    supervisor = Supervisor(settings.run.data_dir)
    supervisor.stop(services, timeout_s=60)


def _value(lake: Lake, query: str) -> float:
    with connect(lake) as connection:
        row = connection.execute(query).fetchone()
    return row[0] if row and row[0] is not None else 0


def _say(line: str) -> None:
    print(line, flush=True)
