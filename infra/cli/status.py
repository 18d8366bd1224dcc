"""`lagoon status`: how each part is, and the loop's figures."""

import time
from collections.abc import Sequence

from rich.text import Text

from infra.cli import arguments, tables
from infra.stack.bring_up import resolve
from infra.stack.health import Part, parts
from infra.stack.programs import KAFKA
from infra.stack.supervise import Supervisor
from infra.watch import LoopState, Watch
from schemas.settings import Settings


def run(argv: Sequence[str]) -> int:
    """Show the state of the current run; 1 if a part is not well or stopped."""
    args, overrides = arguments.parse(arguments.parser("status", "How each part of the run is."), argv)
    settings = resolve(arguments.settings_of(args.config, overrides, must_exist=False))
    supervisor = Supervisor(settings.run.data_dir)
    found = parts(settings, supervisor.states(), supervisor.started())
    tables.show(
        tables.table(
            ("service", "state", "health", "age", "address", "reason"),
            [(p.name, p.state, *told(p)) for p in found],
            f"run {settings.run.name}",
        )
    )
    has_run = (settings.run.folder / "settings.json").exists()
    if has_run and any(p.name == KAFKA and p.health.ok for p in found):
        tables.show(_figures(_look(settings)))
    return 0 if all(p.health.ok for p in found) else 1


def told(part: Part) -> tuple[str | Text, str, str, str]:
    """Health, age, address and reason; what was stopped on purpose is no trouble."""
    if part.is_stopped:
        return "", _age(part), part.health.address, "`lagoon up` starts it"
    return tables.verdict(part.health.ok), _age(part), part.health.address, part.health.reason


def _figures(state: LoopState) -> str:
    scored = state.scored
    score = f"{scored[-1].score:.3f} at version {scored[-1].end_version}" if scored else "none yet"
    outcomes = ", ".join(f"{name} {count}" for name, count in state.outcomes.items() if count) or "none yet"
    return (
        f"train step {state.train_step}, weight version {state.weight_version}, last score {score}\n"
        f"outcomes: {outcomes}\n"
        f"waiting: {state.pending} in open groups, {state.live} live in the lake, {state.available} for the learner"
    )


def _look(settings: Settings, limit_s: float = 3) -> LoopState:
    """The loop's figures, once two polls in a row agree or the limit is reached."""
    watch = Watch(settings, with_usage=False)
    try:
        before, deadline = "", time.monotonic() + limit_s
        while time.monotonic() < deadline:
            figures = _figures(watch.poll())
            if figures == before:
                break
            before = figures
            time.sleep(0.3)
        return watch.state
    finally:
        watch.close()


def _age(part: Part) -> str:
    minutes, seconds = divmod(part.age_s, 60)
    if not part.age_s:
        return ""
    return f"{minutes // 60}h{minutes % 60:02}m" if minutes >= 60 else f"{minutes}m{seconds:02}s"
