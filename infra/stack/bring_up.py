"""Bringing a run up: servers, topics, tables, starting policy, processes; each only where it is missing."""

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from infra.kafka import ensure_topics
from infra.lake import Lake
from infra.locks import locked
from infra.stack import health, kafka, mlflow, ports, programs
from infra.stack.policy import check_packages, prepare_policy
from infra.stack.supervise import Supervisor
from schemas.errors import SettingsError, StackError
from schemas.settings import Settings

Report = Callable[[str], None]


def bring_up(settings: Settings, names: Sequence[str], report: Report) -> Settings:
    """Start what is missing of `names` (none: everything), wait until it answers, and return the resolved settings.

    Safe to call twice: what runs with the same settings is left alone, what runs with others is restarted.

    Raises:
        SettingsError: an unknown name, or settings that no run can be started with.
        StackError: a part does not start, or does not answer within `stack.start_timeout_s`.
    """
    settings = resolve(settings)
    selected = programs.select(settings, names)
    services = [n for n in selected if n not in programs.SERVERS]
    servers = [n for n in programs.SERVERS if (services or n in selected) and programs.is_local(settings, n)]
    if services and not settings.families:
        raise SettingsError("the settings list no task families, so there is nothing to roll out; add [[families]]")
    if services:
        check_packages(settings)
    with exclusive(settings.run.data_dir):
        supervisor = Supervisor(settings.run.data_dir)
        supervisor.launch()
        _start_servers(settings, supervisor, servers)
        if services or programs.KAFKA in selected:
            wait_until_up(settings, supervisor, [n for n in servers if n == programs.KAFKA], report)
            servers = [n for n in servers if n != programs.KAFKA]
            settings = prepare_run(settings, supervisor, report, with_policy=bool(services))
        wait_until_up(settings, supervisor, servers, report)
        if services:
            supervisor.start([programs.service(settings, n) for n in services])
            wait_until_up(settings, supervisor, services, report)
    return settings


def start_servers(settings: Settings, report: Report) -> None:
    """Start the local servers of `settings`, as `resolve` gives them, and wait until they answer.

    Raises:
        StackError: one does not start, or does not answer within `stack.start_timeout_s`.
    """
    servers = [n for n in programs.SERVERS if programs.is_local(settings, n)]
    with exclusive(settings.run.data_dir):
        supervisor = Supervisor(settings.run.data_dir)
        supervisor.launch()
        _start_servers(settings, supervisor, servers)
        wait_until_up(settings, supervisor, servers, report)


def take_down(data_dir: str, report: Report, timeout_s: float = 120) -> None:
    """Stop everything that was started for this data folder, producers first, servers last; data stay.

    Raises:
        DeadlineError: something is still there after `timeout_s`.
    """
    with exclusive(data_dir):
        supervisor = Supervisor(data_dir)
        up = [s.program for s in supervisor.states() if s.is_up]
        for names in programs.stopping_order(up):
            report(f"stopping {', '.join(names)}")
            supervisor.stop(names, timeout_s)
        supervisor.shutdown(timeout_s)


def resolve(settings: Settings) -> Settings:
    """`settings` with an absolute data folder and the addresses of the local servers filled in."""
    run = settings.run.model_copy(update={"data_dir": str(Path(settings.run.data_dir).absolute())})
    settings = settings.model_copy(update={"run": run})
    updates: dict[str, object] = {}
    if programs.is_local(settings, programs.KAFKA):
        prefix = settings.kafka.topic_prefix or f"{run.name}."
        brokers = kafka.local(settings).address
        updates["kafka"] = settings.kafka.model_copy(update={"brokers": brokers, "topic_prefix": prefix})
    if programs.is_local(settings, programs.MLFLOW):
        updates["tracking"] = settings.tracking.model_copy(update={"uri": mlflow.address(settings)})
    return settings.model_copy(update=updates)


def prepare_run(settings: Settings, supervisor: Supervisor, report: Report, with_policy: bool = True) -> Settings:
    """Make the run's topics, tables and starting policy, save its settings, and make it the current run."""
    _leave_other_run(settings, supervisor, report)
    ensure_topics(settings.kafka, settings.stack.start_timeout_s)
    Lake.of(settings).ensure()
    if with_policy:
        policy = settings.policy.model_copy(update={"path": str(prepare_policy(settings, report))})
        settings = settings.model_copy(update={"policy": policy})
    settings.save(settings.run.folder / "settings.json")
    point(_current(settings), settings.run.folder)
    return settings


def wait_until_up(settings: Settings, supervisor: Supervisor, names: Sequence[str], report: Report) -> None:
    """Return when all of `names` answer; one line to `report` for each.

    Raises:
        StackError: one has ended for good, or does not answer within `stack.start_timeout_s`; says which and why.
    """
    started = time.monotonic()
    waiting = list(names)
    while waiting:
        states = {s.program: s for s in supervisor.states()}
        if gone := [n for n in waiting if n not in states]:
            raise StackError(f"the supervisor of {supervisor.data_dir} has ended, and {', '.join(gone)} with it")
        answers = {n: health.check(settings, states[n]) for n in waiting}
        elapsed = time.monotonic() - started
        for name in [n for n in waiting if answers[n].ok or answers[n].is_up]:
            report(f"{name}: {_in_words(answers[name])} ({elapsed:.1f} s)")
            waiting.remove(name)
        ended = [n for n in waiting if not states[n].is_up]
        if ended or (waiting and elapsed > settings.stack.start_timeout_s):
            faults = "\n".join(f"  {n}: {answers[n].reason} (log: {states[n].log})" for n in ended or waiting)
            raise StackError(f"not up after {elapsed:.0f} s:\n{faults}")
        if waiting:
            time.sleep(0.2)


def _in_words(answer: health.Health) -> str:
    if not answer.ok:
        return f"up at {answer.address}, not well yet: {answer.reason}"
    return f"ready at {answer.address}" if answer.address else answer.reason


@contextlib.contextmanager
def exclusive(data_dir: str | Path) -> Generator[None]:
    """Only one command at a time changes a data folder's stack.

    Raises:
        StackError: another one is at it.
    """
    folder = Path(data_dir).absolute()
    late = StackError(f"another lagoon command is starting or stopping {folder}; wait for it")
    with locked(folder / "stack" / "lock", 0, late):
        yield


def _start_servers(settings: Settings, supervisor: Supervisor, names: Sequence[str]) -> None:
    up = {s.program for s in supervisor.states() if s.is_up}
    for name in names:
        address = settings.kafka.brokers if name == programs.KAFKA else settings.tracking.uri
        if name not in up:
            ports.require_free(name, int(address.rpartition(":")[2]), f"stack.{name}_port")
    supervisor.start([programs.server(settings, n) for n in names])


def _leave_other_run(settings: Settings, supervisor: Supervisor, report: Report) -> None:
    """Stop the processes that this run does not have: those of another run, and surplus ones."""
    current = _current(settings)
    same = current.exists() and current.resolve() == settings.run.folder.resolve()
    keep = {*programs.SERVERS, *(programs.service_names(settings) if same else [])}
    others = [s.program for s in supervisor.states() if s.program not in keep]
    if others:
        report(f"stopping {', '.join(others)}" + ("" if same else f" of {current.resolve().name}"))
        supervisor.stop(others, timeout_s=120)
        supervisor.forget(others)


def _current(settings: Settings) -> Path:
    return Path(settings.run.data_dir) / "current"


def point(link: Path, target: Path) -> None:
    """Make the symbolic link `link` point at `target`, which lies beside or below it, in one step."""
    temporary = link.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.relative_to(link.parent))
    temporary.replace(link)
