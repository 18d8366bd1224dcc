"""`lagoon compare`: the synchronous and the asynchronous twin of the same run, one after the other, in one table."""

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from infra.cli import arguments, course, tables
from infra.cli.demo import PROFILE
from infra.compare import MODES, Figures, figures, versus
from infra.stack.bring_up import bring_up, take_down
from infra.stack.supervise import Supervisor
from schemas.errors import SettingsError
from schemas.settings import Settings, load

WORKLOAD = PROFILE.with_name("compare.toml")
SYNC = PROFILE.with_name("sync.toml")

SUMMARY = """\
Run the loop twice on this machine, once with loop.mode = sync and once asynchronously: same tasks, seeds, batch size,
objective and starting policy. Each is a run of its own, as of `lagoon demo`; without other settings on a long-tail
workload. Prints one table, from the lakes of both, and writes all figures as JSON.
"""

Round = dict[str, Any]


def run(argv: Sequence[str]) -> int:
    """Run both twins in every round; 1 if a run ended early or its books do not balance."""
    args, overrides = arguments.parse(_parser(), argv)
    if args.rounds < 1:
        raise SettingsError(f"--rounds is {args.rounds}; it takes one at least")
    stamp = f"compare-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    if args.steps:
        overrides.append(f"--learner.num_train_steps={args.steps}")
    plan = [
        {mode: settings_of_twin(args.config, overrides, mode, number, f"{stamp}-{number + 1}-{mode}") for mode in MODES}
        for number in range(args.rounds)
    ]
    path = Path(args.out or Path(plan[0]["async"].run.data_dir) / f"{stamp}.json").absolute()
    rounds: list[Round] = []
    with _Stage(plan[0]["async"].run.data_dir, 60 * args.minutes) as stage:
        for number, twins in enumerate(plan):
            made = _round(number, twins, stage)
            if stage.stop.is_set():
                break
            rounds.append(made)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"rounds": rounds}, indent=2, default=float) + "\n")
    if not rounds:
        print("interrupted before both twins had run", file=sys.stderr)
        return 1
    tables.show(table(rounds), *map(bound, rounds))
    print(f"comparison: {path}")
    return 0 if all(r[mode]["balanced"] and not r[mode]["ended"] for r in rounds for mode in MODES) else 1


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("compare", SUMMARY)
    parser.add_argument("--steps", type=int, metavar="N", help="train steps of each run (learner.num_train_steps)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end a run after so long, if not before")
    parser.add_argument("--rounds", type=int, default=1, help="each with another seed, in turned order")
    parser.add_argument("--out", metavar="FILE", help="where the figures go; otherwise into run.data_dir")
    return parser


def settings_of_twin(files: Sequence[str], overrides: Sequence[str], mode: str, number: int, name: str) -> Settings:
    """The settings of one twin: what the mode needs stands above what the user gave for both.

    Raises:
        SettingsError: wrong ones, before anything runs.
    """
    files = [str(PROFILE), str(WORKLOAD), *files]
    given = load(files, overrides)
    shared = {"kafka.topic_prefix": f"{given.kafka.topic_prefix}{name}."}
    places = ("lake.uri", "lake.claims_uri", "weights.uri", "learner.checkpoints")
    for key, place in ((key, attrgetter(key)(given)) for key in places):
        shared |= {key: f"{place.rstrip('/')}/{name}"} if place else {}
    own = {"run.name": name, "run.seed": given.run.seed + number, "loop.mode": mode, **shared}
    if mode == "sync":
        own |= {
            f"{n}.{key}": value for n, keys in tomllib.loads(SYNC.read_text()).items() for key, value in keys.items()
        }
    return load(files, [*overrides, *(f"--{key}={json.dumps(value)}" for key, value in own.items())])


class _Stage:
    """Where runs are played one after the other, with one starting policy; servers stay up between them."""

    def __init__(self, data_dir: str, limit_s: float) -> None:
        self._data_dir, self._limit_s, self._policy = data_dir, limit_s, ""
        self._exit = ExitStack()

    def __enter__(self) -> "_Stage":
        self.stop = self._exit.enter_context(course.interrupts())
        if not any(state.is_up for state in Supervisor(self._data_dir).states()):
            self._exit.callback(take_down, self._data_dir, course.say)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def play(self, settings: Settings) -> Figures:
        """Play one run to its end, and measure it."""
        policy = settings.policy.model_copy(update={"path": self._policy or settings.policy.path})
        settings = settings.model_copy(update={"policy": policy})
        try:
            settings = bring_up(settings, [], course.say)
            ended = course.follow(settings, self.stop, self._limit_s)
            course.drain(settings, self.stop, "compare")
        finally:
            course.stop_services(settings, servers_stay=True)
        self._policy = settings.policy.path
        return figures(settings, ended)


def _round(number: int, twins: Mapping[str, Settings], stage: _Stage) -> Round:
    """Both twins, in turned order every other time."""
    order = MODES[:: -1 if number % 2 else 1]
    made: Round = {"round": number + 1, "seed": twins["sync"].run.seed, "order": list(order)}
    for mode in order:
        course.say(f"\nround {number + 1}, {mode}: run {twins[mode].run.name}")
        made[mode] = stage.play(twins[mode])
        if stage.stop.is_set():
            return made
    return made | {"versus": versus(made)}


def table(rounds: Sequence[Round]) -> Table:
    """The figures of both modes side by side; with several rounds mean and standard deviation."""

    def row(label: str, figure: Callable[[Round, str], float | None], digits: int = 2, scale: float = 1) -> list[str]:
        values = {mode: [figure(r, mode) for r in rounds] for mode in MODES}
        return [label, *(_cell(values[mode], digits, scale) for mode in MODES)]

    def of(name: str) -> Callable[[Round, str], float | None]:
        return lambda r, mode: r[mode][name]

    def against(name: str) -> Callable[[Round, str], float | None]:
        return lambda r, mode: r["versus"].get(name, {}).get(mode)

    rows = [
        row("train steps", of("num_steps"), 0),
        row("score at equal samples", against("score_at_samples"), 3),
        row("seconds to these samples", against("elapsed_at_samples_s"), 1),
        row("score at equal time", against("score_at_time"), 3),
        row("seconds to the same score", against("elapsed_at_score_s"), 1),
        row("seconds of a step: waiting for samples", of("wait_s")),
        row("seconds of a step: training, publishing", of("train_s")),
        row("rollouts busy, %", lambda r, mode: r[mode]["busy_share"].get("rollout"), 0, 100),
        row("learner busy, %", lambda r, mode: r[mode]["busy_share"].get("train"), 0, 100),
        row("cost per million effective samples", of("cost_per_effective_sample"), 2, 1e6),
        row("effective sample ratio", of("effective_sample_ratio"), 3),
        row("staleness, mean", of("staleness_mean")),
    ]
    return tables.table(("", *MODES), rows, f"{len(rounds)} rounds, mean ± standard deviation" if rounds[1:] else "")


def bound(made: Round) -> str:
    """How far a round came, in words."""
    seen = made["versus"]
    if not seen:
        return f"round {made['round']}: one of the runs has no score or not two steps, so there is nothing to compare"
    g, t = made["sync"]["wait_s"], made["sync"]["train_s"]
    return (
        f"round {made['round']}, seed {made['seed']}: equal at {seen['num_samples']:,} samples, "
        f"{seen['elapsed_s']:.0f} s, score {seen['target_score']:.3f}\n"
        f"  a step takes {seen['step_ratio']:.2f} of the synchronous one, {seen['of_bound']:.2f} of the bound "
        f"max({g:.1f}, {t:.1f}) / ({g:.1f} + {t:.1f}) = {seen['bound']:.2f}"
    )


def _cell(values: Sequence[float | None], digits: int, scale: float) -> str:
    known = [value * scale for value in values if value is not None]
    if not known:
        return "none"
    spread = f" ± {stdev(known):.{digits}f}" if len(known) > 1 else ""
    missing = f" ({len(values) - len(known)} none)" if len(known) < len(values) else ""
    return f"{fmean(known):.{digits}f}{spread}{missing}"
