"""What an experiment is: a question, arms that differ in one thing, and how long each is trained."""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from schemas.settings import Settings

GROUPS = 8
"""Groups that are sampled for an update."""

BASE = Path(__file__).with_name("base.toml")


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train.

    Attributes:
        name: As the plots call it.
        settings: What it sets beside the experiment's, by dotted name.
        lag: Versions by which the weights that sample are older than those that are trained.
        burst: Updates that one supply of samples has to last for; the supply is as many times larger.
        flipped: Part of the updates, as shares of them, in which every reward is 1 - reward: the bad stretch.
        steered: Whether the evaluator's directives are obeyed.
        groups: Groups that are sampled for an update.
        mini_batches: Optimizer steps of an update, each on a batch of what was sampled for it.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    lag: int = 0
    burst: int = 1
    flipped: tuple[float, float] = (0.0, 0.0)
    steered: bool = False
    groups: int = GROUPS
    mini_batches: int = 1


@dataclass(frozen=True, slots=True)
class Experiment:
    """Arms that answer a question.

    Attributes:
        name: Of the experiment, its plot and its table.
        question: In one sentence.
        arms: The first is what the others are compared with, seed by seed.
        base: File of the settings that experiments with one policy have in common.
        settings: Of all arms, beside `base`.
        seeds: Runs of each arm.
        updates: Weight versions that a run makes.
        score_every: Updates between evaluations.
        shown: Figures beside the score that the table has, of the end of the run.
        scored: What is evaluated, in settings beside `base`; its families by default.
        marked: Part of a run after which the score is shown too, as a share of it.
        by_samples: A run is as long as its samples are worth, branches among them: an update for every GROUPS groups.
        quick: What is otherwise in the quick form.
    """

    name: str
    question: str
    arms: Sequence[Arm]
    base: Path = BASE
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 5
    updates: int = 48
    score_every: int = 12
    shown: Sequence[str] = ()
    scored: Mapping[str, Any] = field(default_factory=dict)
    marked: float = 0.0
    by_samples: bool = False
    quick: Mapping[str, Any] = field(default_factory=lambda: {"seeds": 2, "updates": 8})

    @property
    def small(self) -> "Experiment":
        """The quick form: that everything runs, no finding."""
        return replace(self, **self.quick)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run: one arm with one seed."""

    experiment: Experiment
    arm: Arm
    seed: int

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What a finished run is known by."""
        return self.experiment.name, self.arm.name, self.seed, self.fingerprint

    @property
    def updates(self) -> int:
        """How long it is."""
        return self.experiment.updates

    @property
    def settings(self) -> Settings:
        """The resolved settings; `curate.capacity` and others may refuse to fit together."""
        named = {"loop.max_staleness": self.arm.lag, **self.experiment.settings, **self.arm.settings}
        return settings_of(self.seed, named, self.experiment.base)

    @property
    def fingerprint(self) -> str:
        """A hash of all that is set for a run: another one is another run. Defaults belong to the code."""
        of_arm = {"lag": self.arm.lag, "burst": self.arm.burst, "flipped": self.arm.flipped}
        of_run = {"steered": self.arm.steered, "updates": self.updates, "every": self.experiment.score_every}
        more = {"groups": self.arm.groups, "mini_batches": self.arm.mini_batches}
        more |= {"scored": self.experiment.scored, "by_samples": self.experiment.by_samples}
        plain = {"groups": GROUPS, "mini_batches": 1, "scored": {}, "by_samples": False}
        whole = self.settings.model_dump(mode="json", exclude_defaults=True) | of_arm | of_run
        whole |= {name: value for name, value in more.items() if value != plain[name]}
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]


def settings_of(seed: int, named: Mapping[str, Any] | None = None, base: Path = BASE) -> Settings:
    """Those in the file `base`, with the seed and what is `named` by dotted names."""
    merged = tomllib.loads(base.read_text())
    for name, value in {"run.seed": seed, **(named or {})}.items():
        *path, last = name.split(".")
        reduce(lambda into, part: into.setdefault(part, {}), path, merged)[last] = value
    return Settings.model_validate(merged)


def plans(experiments: Sequence[Experiment]) -> Iterator[Plan]:
    """All runs, seed by seed, so that what is there at any time compares all arms."""
    for seed in range(max((experiment.seeds for experiment in experiments), default=0)):
        for experiment in experiments:
            if seed < experiment.seeds:
                yield from (Plan(experiment, arm, seed) for arm in experiment.arms)
