"""The parts of the evaluator and its verbs; `inference.evaluate` is the loop over them."""

import asyncio
import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

from prometheus_client import Counter, Gauge

from inference import agent, scoring
from inference.eval_plan import Job, Kind, full, held_out_tasks, light, training_tasks
from inference.metered import Meter, MeteredEngine, TokenBudget
from inference.serving import Server
from inference.steering import Order, Steering
from inference.tokenizer import ChatTokenizer
from inference.tools import Toolbox
from schemas.errors import LagoonError
from schemas.messages import Directive, EvalResult, Message, Task
from schemas.settings import Settings
from schemas.topics import CONTROL, EVALS
from schemas.trajectory import Trajectory

EVALUATED = Counter("lagoon_evaluations", "Eval results", ["kind"])
EVAL_SCORE = Gauge("lagoon_eval_score", "Score of the version evaluated last", ["family"])
EVAL_VERSION = Gauge("lagoon_eval_version", "Version evaluated last")

ALL_FAMILIES = "all"

_FAILED: dict[Kind, str] = {"light": "not evaluated", "full": "no full evaluation"}
"""How the reason of a row begins whose evaluation failed."""

Publish = Callable[[str, str, Message], None]
"""(contract topic, key, message): sees it into Kafka, now or later."""


class Scoreboard(Protocol):
    """What is needed of `infra.tracking.Tracking`."""

    def metrics(self, values: dict[str, float], step: int) -> None: ...
    def alias(self, name: str, version: int) -> None: ...


class UsageMeter(Meter, Protocol):
    """What is needed of `infra.usage.Usage`."""

    def add(self, tokens: int = 0, episodes: int = 0, failed: int = 0) -> None: ...
    def version(self, version: int) -> None: ...


class Training(Protocol):
    """What is needed of `inference.returning.Returning`: where episodes go that are to be trained on."""

    @property
    def is_full(self) -> bool: ...
    def started(self, task: Task) -> None: ...
    def finished(self, trajectory: Trajectory) -> None: ...


class Evaluator:
    """Evaluates versions on held-out tasks, says what came out, and steers.

    Light and full evaluations run side by side, each with its own of `servers` and pinned to its version.

    Attributes:
        last: The newest version that was judged, evaluated or skipped.
        champion: The result with the best lower bound so far.
    """

    def __init__(
        self,
        settings: Settings,
        servers: Mapping[Kind, Server],
        publish: Publish,
        board: Scoreboard,
        usage: UsageMeter,
        *,
        name: str,
        training: Training | None = None,
    ) -> None:
        self.last, self._last_full, self._latest = 0, 0, 0
        self.champion: EvalResult | None = None
        self._settings, self._servers, self._publish, self._training = settings, servers, publish, training
        self._board, self._usage, self._name = board, usage, name
        self._steering = Steering(settings)
        self._toolbox = Toolbox()
        self._limits = dataclasses.replace(
            agent.Limits.of(settings.rollout), temperature=settings.evaluator.temperature
        )

    def remember(self, results: Sequence[EvalResult]) -> None:
        """Take in the results of an earlier life; they are answered already."""
        for result in results:
            self._note(result)
            self._steering.judge(result)

    def next_jobs(self, versions: Sequence[int], running: Collection[Kind] = ()) -> list[Job]:
        """What to do about the versions that are there, beside the jobs that are `running`."""
        jobs = (light(versions, self.last), full(versions, self._last_full, self._settings.evaluator.full_every))
        return [job for job in jobs if job and job.kind not in running]

    async def run(self, job: Job) -> EvalResult:
        """Evaluate, publish a row for every version of the job, and send the orders that the score calls for.

        A version older than the newest that was judged is compared with, and gives no orders.

        Raises:
            OSError, obstore.exceptions.BaseError: the weight store is away; the job can be run again.
        """
        result = await self._evaluate(job)
        for version in job.passed_over:
            self._report(_skipped(version, f"passed over: version {job.version} was there first"), job)
        self._report(result, job)
        for order in self._steering.judge(result):
            directive = _directive(order, self._name)
            self._publish(CONTROL.name, directive.target, directive)
        return result

    async def _evaluate(self, job: Job) -> EvalResult:
        started_at = datetime.now(UTC)
        try:
            server = self._servers[job.kind]
            await server.serve(job.version)
            episodes = await self._play_all(job, server)
        except LagoonError as error:
            return _skipped(job.version, f"{_FAILED[job.kind]}: {error}")
        return self._result(job, episodes, server.loaded, started_at)

    async def _play_all(self, job: Job, server: Server) -> list[Trajectory]:
        """The episodes on held-out tasks; those that are to be trained on are played beside them, and handed over."""
        evaluator, now = self._settings.evaluator, datetime.now(UTC)
        samples = evaluator.full_samples_per_family if job.kind == "full" else evaluator.samples_per_family
        play, places = self._player(server), asyncio.Semaphore(self._settings.rollout.max_episodes)

        async def one(task: Task, index: int = 0) -> Trajectory:
            async with places:
                return await play(task, index)

        async with asyncio.TaskGroup() as group:
            tasks = held_out_tasks(self._settings, samples, now)
            playing = [group.create_task(one(task)) for task in tasks]
            if self._training and job.kind == "light" and not self._training.is_full:
                for task in training_tasks(self._settings, job.version, now):
                    self._training.started(task)
                    for index in range(task.group_size):
                        group.create_task(one(task, index)).add_done_callback(partial(_hand_over, self._training))
        return [each.result() for each in playing]

    def _player(self, server: Server) -> Callable[[Task, int], Awaitable[Trajectory]]:
        loaded, folder = server.current
        engine = MeteredEngine(loaded, self._usage, TokenBudget(self._settings.rollout.token_budget))
        tokenizer = ChatTokenizer.load(folder)

        async def play(task: Task, index: int) -> Trajectory:
            return await agent.play(
                task,
                index,
                engine=engine,
                tokenizer=tokenizer,
                toolbox=self._toolbox,
                limits=self._limits,
                producer=self._name,
            )

        return play

    def _result(self, job: Job, episodes: Sequence[Trajectory], end_version: int, started_at: datetime) -> EvalResult:
        success = self._settings.loop.success_reward
        counts = scoring.tally(episodes, success)
        low, high = scoring.wilson(counts.successes, counts.num_scored)
        num_tokens = sum(e.num_generated_tokens for e in episodes)
        self._usage.add(tokens=num_tokens, episodes=len(episodes), failed=counts.num_unscored)
        self._usage.version(end_version)
        return EvalResult(
            eval_id=str(uuid.uuid4()),
            kind=job.kind,
            requested_version=job.version,
            start_version=job.version,
            end_version=end_version,
            score=counts.score,
            low=low if counts.num_scored else None,
            high=high if counts.num_scored else None,
            num_scored=counts.num_scored,
            num_unscored=counts.num_unscored,
            families=scoring.by_family(episodes, success),
            reason=counts.reason,
            num_tokens=num_tokens,
            started_at=started_at,
            finished_at=datetime.now(UTC),
        )

    def _report(self, result: EvalResult, job: Job) -> None:
        self._publish(EVALS.name, f"{result.requested_version}/{job.kind}", result)
        EVALUATED.labels(result.kind).inc()
        leads = self._note(result)
        if result.score is None:
            return
        scores = {name: s.score for name, s in result.families.items() if s.score is not None}
        self._board.metrics(_metrics(result, scores), step=result.end_version)
        if result.end_version >= self._latest:
            self._latest = result.end_version
            for family, score in {ALL_FAMILIES: result.score, **scores}.items():
                EVAL_SCORE.labels(family).set(score)
            EVAL_VERSION.set(result.end_version)
            self._board.alias("latest", result.end_version)
        if leads:
            self._board.alias("champion", result.end_version)

    def _note(self, result: EvalResult) -> bool:
        """Remember `result`; true if it makes a new champion. A failed evaluation is due again with the next one."""
        if _is_full(result):
            self._last_full = max(self._last_full, result.requested_version)
        else:
            self.last = max(self.last, result.requested_version)
        leads = scoring.leads(result, self.champion, self._settings.evaluator.max_unscored_ratio)
        self.champion = result if leads else self.champion
        return leads


def _hand_over(training: Training, playing: asyncio.Task[Trajectory]) -> None:
    if not playing.cancelled() and not playing.exception():
        training.finished(playing.result())


def _metrics(result: EvalResult, scores: dict[str, float]) -> dict[str, float]:
    """Figures by name; those of a full evaluation stand beside the light one's of the same version."""
    assert result.score is not None  # noqa: S101 - only scored results come here
    bounds = {"low": result.low or 0.0, "high": result.high or 1.0}
    counts = {"num_scored": float(result.num_scored), "num_unscored": float(result.num_unscored)}
    families = {f"score/{name}": score for name, score in scores.items()}
    prefix = "eval_full" if result.kind == "full" else "eval"
    figures = {"score": result.score, **bounds, **counts, **families}
    return {f"{prefix}/{name}": value for name, value in figures.items()}


def _skipped(version: int, reason: str) -> EvalResult:
    now = datetime.now(UTC)
    return EvalResult(
        eval_id=str(uuid.uuid4()),
        kind="skipped",
        requested_version=version,
        start_version=version,
        end_version=version,
        score=None,
        num_scored=0,
        num_unscored=0,
        reason=reason[:2000],
        started_at=now,
        finished_at=now,
    )


def _is_full(result: EvalResult) -> bool:
    """Whether a full evaluation came to `result`, or to nothing: a `skipped` row says so in its reason only."""
    return result.kind == "full" or (result.kind == "skipped" and (result.reason or "").startswith(_FAILED["full"]))


def _directive(order: Order, name: str) -> Directive:
    return Directive.model_validate(
        {
            "directive_id": str(uuid.uuid4()),
            "target": order.target,
            "issued_by": name,
            "issued_at": datetime.now(UTC),
            "reason": order.reason,
            **order.changes,
        }
    )
