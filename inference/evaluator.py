"""The parts of the evaluator and its verbs; `inference.evaluate` is the loop over them."""

import asyncio
import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol

from prometheus_client import Counter, Gauge

from inference import agent, scoring
from inference.eval_plan import Job, held_out_tasks, plan
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


class Evaluator:
    """Evaluates versions on held-out tasks, says what came out, and steers.

    Attributes:
        last: The newest version that was judged, evaluated or skipped.
        champion: The result with the best lower bound so far.
    """

    def __init__(
        self, settings: Settings, server: Server, publish: Publish, board: Scoreboard, usage: UsageMeter, *, name: str
    ) -> None:
        self.last, self._last_full = 0, 0
        self.champion: EvalResult | None = None
        self._settings, self._server, self._publish = settings, server, publish
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

    def next_job(self, versions: Sequence[int]) -> Job | None:
        """What to do about the versions that are there."""
        return plan(versions, self.last, self._last_full, self._settings.evaluator.full_every)

    async def run(self, job: Job) -> EvalResult:
        """Evaluate, publish a row for every version of the job, and send the orders that the score calls for.

        Raises:
            OSError, obstore.exceptions.BaseError: the weight store is away; the job can be run again.
        """
        result = await self._evaluate(job)
        for version in job.passed_over:
            self._report(_skipped(version, f"passed over: version {job.version} was there first"))
        self._report(result)
        for order in self._steering.judge(result):
            directive = _directive(order, self._name)
            self._publish(CONTROL.name, directive.target, directive)
        return result

    async def _evaluate(self, job: Job) -> EvalResult:
        started_at = datetime.now(UTC)
        try:
            await self._server.serve(job.version)
            episodes = await self._play_all(job)
        except LagoonError as error:
            return _skipped(job.version, f"not evaluated: {error}")
        end_version = self._server.loaded
        return self._result(job, episodes, end_version, started_at)

    async def _play_all(self, job: Job) -> list[Trajectory]:
        evaluator = self._settings.evaluator
        samples = evaluator.full_samples_per_family if job.kind == "full" else evaluator.samples_per_family
        play, places = self._player(), asyncio.Semaphore(self._settings.rollout.max_episodes)

        async def one(task: Task) -> Trajectory:
            async with places:
                return await play(task, 0)

        tasks = held_out_tasks(self._settings, samples, datetime.now(UTC))
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(one(task)) for task in tasks]
        return [each.result() for each in playing]

    def _player(self) -> Callable[[Task, int], Awaitable[Trajectory]]:
        loaded, folder = self._server.current
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

    def _report(self, result: EvalResult) -> None:
        self._publish(EVALS.name, str(result.requested_version), result)
        EVALUATED.labels(result.kind).inc()
        leads = self._note(result)
        if result.score is None:
            return
        scores = {name: s.score for name, s in result.families.items() if s.score is not None}
        for family, score in {ALL_FAMILIES: result.score, **scores}.items():
            EVAL_SCORE.labels(family).set(score)
        EVAL_VERSION.set(result.end_version)
        self._board.metrics(_metrics(result, scores), step=result.end_version)
        self._board.alias("latest", result.end_version)
        if leads:
            self._board.alias("champion", result.end_version)

    def _note(self, result: EvalResult) -> bool:
        """Remember `result`; true if it makes a new champion."""
        self.last = max(self.last, result.requested_version)
        if result.kind == "full":
            self._last_full = max(self._last_full, result.requested_version)
        leads = scoring.leads(result, self.champion, self._settings.evaluator.max_unscored_ratio)
        self.champion = result if leads else self.champion
        return leads


def _metrics(result: EvalResult, scores: dict[str, float]) -> dict[str, float]:
    assert result.score is not None  # noqa: S101 - only scored results come here
    bounds = {"eval/low": result.low or 0.0, "eval/high": result.high or 1.0}
    counts = {"eval/num_scored": float(result.num_scored), "eval/num_unscored": float(result.num_unscored)}
    families = {f"eval/score/{name}": score for name, score in scores.items()}
    return {"eval/score": result.score, **bounds, **counts, **families}


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
