"""The dispatcher: opens groups, keeps their leases, issues again what did not come back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa

from flows.steps.difficulty import Posterior
from flows.steps.dispatches import Entry, to_rows
from flows.steps.draw import Choice, Deal, Difficulty, draw
from flows.steps.rounds import Round
from flows.steps.stored import Stored
from flows.steps.supply import Supply
from infra.control import refused
from schemas.messages import BufferReport, Directive, Fork, LearnerReport, Task, WeightSummary
from schemas.names import OUTCOMES, Event, Origin
from schemas.settings import Settings

PAUSE_S = 5.0
"""A clock that moved by more, either way, was set or was the dispatcher's absence; no lease has to answer for it."""

MAX_FORKS = 256
"""Groups of branches that are open at most; their prefixes lie in the state."""

News = BufferReport | LearnerReport | Fork | WeightSummary | Directive


class Lease(NamedTuple):
    """An open group: the task as last issued, and when the lease on it ends."""

    task: Task
    until_ms: int


@dataclass(slots=True)
class State(Stored):
    """What the dispatcher knows. `decided` are tasks of this epoch, `ready` those of epochs before.

    `weight_version` is the newest, and `train_step` the one that made it.
    """

    FLOW = "dispatch"
    FORMAT = 5

    supply: Supply
    now_ms: int = 0
    weight_version: int = 0
    train_step: int = 0
    num_draws: int = 0
    pause: Directive | None = None
    min_weight_version: int = 0
    family_weights: dict[str, float] = field(default_factory=dict)
    directive_id: str | None = None
    leases: dict[str, Lease] = field(default_factory=dict)
    posteriors: dict[str, Posterior] = field(default_factory=dict)
    shards: dict[str, dict[str, int]] = field(default_factory=dict)
    branches: dict[str, int] = field(default_factory=dict)
    live: dict[str, dict[int, int]] = field(default_factory=dict)
    round: Round = field(default_factory=Round)
    decided: list[Task] = field(default_factory=list)
    ready: list[Task] = field(default_factory=list)


class Dispatcher:
    """Decides at every reading of the clock. Its rows are gathered until `rows()` takes them.

    A task is sent one epoch after it was decided: by then the decision, its row and its lease are durable, so that no
    crash can leave a task at large that the dispatcher does not know.
    """

    def __init__(self, settings: Settings, state: State | None = None) -> None:
        self.settings = settings
        self.state = state or State(Supply.of(settings))
        self._entries: list[Entry] = []

    # what it hears

    def hear(self, news: News) -> None:
        """Take in a message."""
        if isinstance(news, BufferReport):
            self._hear_shard(news)
        elif isinstance(news, LearnerReport):
            self.state.supply.note_learner(news.num_available, self.state.now_ms, self.settings)
            self.state.round.note_learner(news, self.state.now_ms, self.settings)
            self._note_version(news.weight_version, news.train_step)
        elif isinstance(news, WeightSummary):
            self._note_version(news.version, news.train_step)
        elif isinstance(news, Fork):
            self._fork(news)
        elif news.target in {"dispatch", "all"}:
            self._follow(news)

    def _hear_shard(self, report: BufferReport) -> None:
        state = self.state
        for closed in report.closed:
            state.leases.pop(closed.group_id, None)
        for p in report.posteriors:
            state.posteriors[p.task_id] = Posterior(p.alpha, p.beta, p.weight_version)
        state.shards[report.shard] = dict(report.trajectories)
        state.live[report.shard] = dict(report.live)
        totals = state.shards.values()
        state.branches[report.shard] = report.num_branches
        state.supply.admitted = sum(t.get(Event.ADMITTED, 0) for t in totals) - sum(state.branches.values())
        state.supply.stale = sum(t.get(Event.STALE, 0) for t in totals)
        state.supply.outcomes = sum(t.get(event, 0) for t in totals for event in OUTCOMES)

    def _note_version(self, version: int, train_step: int) -> None:
        if version > self.state.weight_version:
            self.state.weight_version, self.state.train_step = version, train_step

    def _follow(self, directive: Directive) -> None:
        state = self.state
        now = _time(state.now_ms) if state.now_ms else None
        if refused(directive, directive.refusal(state.weight_version, self.settings.loop.max_staleness, now)):
            return
        state.directive_id = directive.directive_id
        if directive.pause is not None:
            state.pause = directive if directive.pause else None
        if directive.min_weight_version is not None:
            state.min_weight_version = directive.min_weight_version
        if directive.family_weights is not None:
            state.family_weights = dict(directive.family_weights)

    # what it decides

    def tick(self, now_ms: int) -> None:
        """Decide what the time calls for: leases that ran out, then new groups."""
        self._pass_time(now_ms)
        self.state.supply.note_time(now_ms)
        for lease in [x for x in self.state.leases.values() if x.until_ms <= now_ms]:
            self._run_out(lease.task)
        if self._is_paused or not self.state.weight_version:  # before the first version there is nothing to run
            return
        for _ in range(self._num_groups()):
            self._open()

    def _num_groups(self) -> int:
        state, loop = self.state, self.settings.loop
        tasks = [lease.task for lease in state.leases.values() if lease.task.branch is None]
        if loop.mode == "async":
            return state.supply.num_groups(len(tasks), loop.group_size)
        if state.train_step >= self.settings.learner.num_train_steps:  # nobody would train on another round
            return 0
        return state.round.num_groups(state.weight_version, state.now_ms, state.live.values(), tasks, self.settings)

    @property
    def _is_paused(self) -> bool:
        return self.state.pause is not None and self.state.pause.pauses(_time(self.state.now_ms))

    def _pass_time(self, now_ms: int) -> None:
        state = self.state
        away_ms = now_ms - state.now_ms if state.now_ms else 0
        state.now_ms = now_ms
        if abs(away_ms) > max(PAUSE_S, 10 * self.settings.dispatch.tick_s) * 1000:
            state.leases = {k: x._replace(until_ms=x.until_ms + away_ms) for k, x in state.leases.items()}
            state.supply.shift(away_ms)
            state.round.shift(away_ms)

    def _run_out(self, task: Task) -> None:
        if self._is_paused:
            self._abandon(task, "its lease ran out while dispatch was paused")
        elif task.attempt >= self.settings.dispatch.max_attempts:
            self._abandon(task, f"{task.attempt} leases of {self.settings.dispatch.lease_s:g} s ran out")
        else:
            again = {"attempt": task.attempt + 1, "min_weight_version": self._oldest_version(), **self._lease()}
            self._issue(task.model_copy(update=again), "reissued", "its lease ran out")

    def _abandon(self, task: Task, reason: str) -> None:
        del self.state.leases[task.group_id]
        self._entries.append(Entry(task, "abandoned", reason, self.state.now_ms))

    def _open(self) -> None:
        run, number = self.settings.run, self.state.num_draws
        choice = self._choose(number)
        self.state.num_draws += 1
        new = Task.of(
            choice.family,
            choice.task_index,
            draw=number,
            run=run.in_this_life(run.name),
            group_size=self.settings.loop.group_size,
            seed=run.seed,  # of the task set: the same task is the same problem at every draw
            min_weight_version=self._oldest_version(),
            directive_id=self.state.directive_id,
            **self._lease(),
        )
        self._issue(new, "opened", choice.reason)

    def _fork(self, fork: Fork) -> None:
        """Open the group of the branches that `fork` asks for. What is refused is not asked for again."""
        state, settings = self.state, self.settings
        family = next((f for f in settings.families if f.name == fork.family), None)
        if family is None or not state.now_ms or fork.group_id in state.leases:
            return
        task = Task.of(
            family,
            fork.index,
            draw=0,
            group_id=fork.group_id,
            group_size=fork.num_branches,
            seed=settings.run.seed,
            origin=Origin.COUNTERFACTUAL,
            branch=fork.branch,
            min_weight_version=self._oldest_version(),
            directive_id=state.directive_id,
            **self._lease(),
        )
        if refusal := self._no_room_for_branches():
            self._entries.append(Entry(task, "abandoned", refusal, state.now_ms))
        else:
            self._issue(task, "opened", f"branches of {fork.branch.parent_id} at turn {fork.branch.turn + 1}")

    def _no_room_for_branches(self) -> str | None:
        if self._is_paused:
            return "it was asked for while dispatch was paused"
        num_open = sum(lease.task.branch is not None for lease in self.state.leases.values())
        return f"{num_open} groups of branches are open" if num_open >= MAX_FORKS else None

    def _choose(self, number: int) -> Choice:
        state, settings = self.state, self.settings
        return draw(
            settings.run.seed,
            number,
            settings.families,
            Difficulty(state.posteriors, state.weight_version, settings.curate),
            Deal(state.family_weights, settings.dispatch.exploration),
            busy={lease.task.task_id for lease in state.leases.values()},
        )

    def _issue(self, task: Task, event: str, reason: str | None) -> None:
        self.state.leases[task.group_id] = Lease(task, _ms(task.lease_until))
        self.state.decided.append(task)
        self._entries.append(Entry(task, event, reason, self.state.now_ms))

    def _lease(self) -> Mapping[str, Any]:
        lease_ms = round(self.settings.dispatch.lease_s * 1000)
        now_ms = self.state.now_ms
        return {"dispatched_at": _time(now_ms), "lease_until": _time(now_ms + lease_ms)}

    def _oldest_version(self) -> int:
        by_staleness = self.state.weight_version - self.settings.loop.max_staleness
        return max(by_staleness, self.state.min_weight_version, 1)

    # what it says

    def end_epoch(self) -> bytes:
        """The state at the end of an epoch; what it holds is sent once the epoch is durable."""
        self.state.ready += self.state.decided
        self.state.decided = []
        return self.state.to_bytes()

    def send(self) -> list[Task]:
        """Tasks of epochs that are durable, each once in this life of the process."""
        tasks, self.state.ready = self.state.ready, []
        return tasks

    def clock(self) -> Directive:
        """The message by which curation knows the time."""
        at = _time(self.state.now_ms)
        return Directive(directive_id=f"clock-{self.state.now_ms}", target="clock", issued_by="dispatch", issued_at=at)

    def rows(self) -> pa.RecordBatch | None:
        """Rows of `dispatches` since the last call."""
        entries, self._entries = self._entries, []
        return to_rows(entries) if entries else None


def _ms(time: datetime) -> int:
    return round(time.timestamp() * 1000)


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
