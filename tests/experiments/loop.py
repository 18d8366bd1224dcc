"""One run: the whole loop in one process and one thread, in lockstep, so that staleness is what the arm says."""

import dataclasses
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from inference.eval_plan import held_out_tasks
from inference.steering import Order, Steering
from schemas.messages import Directive, EvalResult
from schemas.names import OUTCOMES, Event
from schemas.trajectory import Trajectory
from tests.experiments.actors import Actors, judged
from tests.experiments.arms import GROUPS, Plan, settings_of
from tests.experiments.curation import Curation, flow_time
from tests.experiments.learner import Learner
from tests.experiments.results import Measure
from trainers.metrics import StepMetrics
from trainers.ranks import Ranks


@dataclass(slots=True)
class Since:
    """What happened since the last evaluation."""

    events: Counter[str] = field(default_factory=Counter)
    steps: list[StepMetrics] = field(default_factory=list)


class Run:
    """A plan at work."""

    def __init__(self, plan: Plan, ranks: Ranks, policy: Path, folder: Path):
        self.measures: list[Measure] = []
        self._plan, self._settings = plan, plan.settings
        self._actors = Actors(self._settings, policy)
        self._curation = Curation(self._settings)
        self._learner = Learner(self._settings, ranks, policy, folder, plan.arm.lag + 2)
        self._steering = Steering(self._settings)
        self._family_weights: dict[str, float] = {}
        self._for_curation: list[Directive] = []
        self._since, self._samples, self._branches, self._wall_s = Since(), 0, 0, 0.0
        self._rates, self._num_falls = list[float](), 0

    async def run(self) -> list[Measure]:
        """Train to the end; returns what was measured on the way."""
        plan, number, due = self._plan, 0, 0
        while (done := self._done(number)) < plan.updates:
            if done >= due:
                await self._evaluate(number)
                due += plan.experiment.score_every
            began = time.perf_counter()
            await self._supply(number)
            self._since.steps += self._learner.update(plan.arm.mini_batches)
            self._rates.append(self._learner.orders.learning_rate_scale)
            self._wall_s += time.perf_counter() - began
            number += 1
        await self._evaluate(number, last=True)
        await self._actors.close()
        self._learner.close()
        return self.measures

    def _done(self, number: int) -> int:
        """How much of the plan's updates the first `number` are worth."""
        a_worth = GROUPS * self._settings.loop.group_size
        return self._samples // a_worth if self._plan.experiment.by_samples else number

    async def _supply(self, number: int) -> None:
        """Groups enough for the updates until the next supply, sampled by weights as old as the arm says."""
        arm, loop, version = self._plan.arm, self._settings.loop, self._learner.version
        groups = arm.groups * arm.burst if number % arm.burst == 0 else 0
        tasks = self._curation.tasks(groups, version, self._family_weights)
        served = max(version - arm.lag, 1)
        members = await self._actors.play(tasks, served, self._learner.weights(served))
        first, end = (round(share * self._plan.updates) for share in arm.flipped)
        if first <= number < end:
            members = [flipped(member) for member in members]
        curated = self._curation.curate(members, version, self._for_curation)
        self._for_curation.clear()
        if curated.forks:
            branches = self._curation.branches(curated.forks, version)
            came = await self._actors.play(branches, served, self._learner.weights(served))
            self._learner.take_in(self._curation.curate(came, version, ()))
            self._branches += len(came)
            self._samples += len(came)
        self._learner.take_in(curated)
        self._since.events += curated.events
        self._samples += groups * loop.group_size

    async def _evaluate(self, step: int, last: bool = False) -> None:
        experiment, version = self._plan.experiment, self._learner.version
        held_out = settings_of(self._settings.run.seed, experiment.scored, experiment.base)
        evaluator = self._settings.evaluator
        samples = evaluator.full_samples_per_family if last else evaluator.samples_per_family
        tasks = held_out_tasks(held_out, samples, datetime.now(UTC))
        episodes = await self._actors.play(tasks, version, self._learner.weights(version))
        result = judged(version, episodes, held_out)
        self._note(step, result, episodes)
        if self._plan.arm.steered:
            for order in self._steering.judge(result):
                self._follow(order)

    def _follow(self, order: Order) -> None:
        directive = directive_of(order, self._learner.version)
        self._family_weights = directive.family_weights or self._family_weights
        self._num_falls += (directive.learning_rate_scale or 1.0) < 1
        self._learner.obey(directive)
        self._for_curation.append(directive)

    def _note(self, step: int, result: EvalResult, episodes: Sequence[Trajectory]) -> None:
        since, self._since = self._since, Since()
        outcomes = sum(since.events[event] for event in OUTCOMES)
        found = {
            "score": result.score or 0.0,
            "turns": fmean(len(episode.turns) for episode in episodes),
            "process_reward": fmean(sum(turn.reward for turn in episode.turns) for episode in episodes),
            "learning_rate_scale": fmean(self._rates or [1.0]),
            "falls_answered": float(self._num_falls),
            "updates": float(step),
            "branches": float(self._branches),
        }
        if self._learner.decisive:
            found["credit_of_decisive_turn"] = fmean(self._learner.decisive)
        if outcomes:
            found["admitted_ratio"] = since.events[Event.ADMITTED] / outcomes
        if since.steps:
            found["entropy"] = fmean(s.entropy for s in since.steps)
            found["effective_sample_ratio"] = fmean(s.effective_sample_ratio for s in since.steps)
            found["clip_ratio"] = fmean(s.clip_ratio for s in since.steps)
        self.measures += [Measure(step, self._samples, self._wall_s, name, value) for name, value in found.items()]


async def play_out(plan: Plan, ranks: Ranks, policy: Path) -> list[Measure]:
    """What `plan` comes to from the starting `policy`."""
    with tempfile.TemporaryDirectory(prefix="experiment-") as folder:
        return await Run(plan, ranks, policy, Path(folder)).run()


def flipped(member: Trajectory) -> Trajectory:
    """The same with the opposite reward, where it has one."""
    return member if member.reward is None else dataclasses.replace(member, reward=1.0 - member.reward)


def directive_of(order: Order, version: int) -> Directive:
    """The evaluator's order as it would be sent."""
    stamp = {"directive_id": str(uuid.uuid4()), "issued_by": "experiment", "issued_at": flow_time(version)}
    return Directive.model_validate({**stamp, "target": order.target, "reason": order.reason, **order.changes})
