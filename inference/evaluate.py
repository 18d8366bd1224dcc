"""The evaluator and curator: `python -m inference.evaluate`."""

import asyncio
import os
from collections import deque
from functools import partial

from obstore.exceptions import BaseError

from inference.earlier import earlier
from inference.engines.registry import Wanted, make_engine
from inference.environments.base import try_families
from inference.eval_plan import Job, Kind, without_held_out
from inference.evaluator import Evaluator
from inference.returning import Returning
from inference.serving import Server, serving_precision
from infra.kafka import Producer
from infra.telemetry import Stop, Telemetry, logger, main
from infra.tracking import Tracking
from infra.usage import Usage
from infra.weights import WeightStore
from schemas.errors import BrokerError
from schemas.messages import Message
from schemas.names import Phase, Service
from schemas.settings import Settings

_POLL_S = 0.2
_NICENESS = 5


class Outgoing:
    """Messages on their way to Kafka; what it does not take is sent again, in order of failure."""

    def __init__(self, producer: Producer) -> None:
        self.error: BrokerError | None = None
        self._producer = producer
        self._again: deque[tuple[str, str, Message]] = deque()

    def publish(self, topic: str, key: str, message: Message) -> None:
        """Send a message to a contract topic."""
        on_delivery = partial(self._delivered, (topic, key, message))
        self._producer.send(topic, key, message.to_bytes(), on_delivery=on_delivery)

    def pump(self) -> None:
        """Serve answers, and send again what failed."""
        self._producer.poll()
        for _ in range(len(self._again)):
            self.publish(*self._again.popleft())

    def _delivered(self, item: tuple[str, str, Message], error: BrokerError | None) -> None:
        self.error = error
        if error is not None:
            self._again.append(item)


class Evaluation:
    """The evaluator's verbs."""

    def __init__(self, settings: Settings, telemetry: Telemetry) -> None:
        self._telemetry, self._log = telemetry, logger(Service.EVALUATOR, telemetry.instance)
        self._producer = Producer(settings.kafka, telemetry.instance)
        self._outgoing = Outgoing(self._producer)
        self._usage = Usage(
            self._producer, Service.EVALUATOR, telemetry.instance, Phase.EVAL, settings.telemetry.usage_s
        )
        self._board = Tracking(settings, f"{settings.run.name}-evals", _run_id(settings))
        self._store = WeightStore.of(settings)
        self._servers: dict[Kind, Server] = {kind: self._server(settings, kind) for kind in ("light", "full")}
        self._returning: Returning | None = None
        if settings.evaluator.train_groups_per_family:
            self._returning = Returning(settings, self._producer, self._usage.produced)
        self._evaluator = Evaluator(
            settings,
            self._servers,
            self._outgoing.publish,
            self._board,
            self._usage,
            name=telemetry.instance,
            training=self._returning,
        )
        self._running: dict[Kind, asyncio.Task[None]] = {}
        self._evaluator.remember(earlier(settings, telemetry.instance))
        self._settings = settings
        if missing := without_held_out(settings.families):
            self._log.warning("families without held-out tasks are not evaluated", families=missing)

    async def judge(self) -> None:
        """Begin what is to be evaluated now beside what is being evaluated, and take in what has ended."""
        try:
            done = [job for job in self._running.values() if job.done()]
            self._running = {kind: job for kind, job in self._running.items() if job not in done}
            for job in done:
                job.result()
            versions = await asyncio.to_thread(self._store.versions)
            for new in self._evaluator.next_jobs(versions, self._running):
                self._running[new.kind] = asyncio.create_task(self._run(new))
        except (OSError, BaseError) as error:
            self._telemetry.health(False, f"the weight store cannot be read: {error}")
            await asyncio.sleep(_POLL_S)
            return
        self._telemetry.health(*self._health())
        await asyncio.sleep(_POLL_S)

    async def report(self) -> None:
        """Usage, and answers from Kafka."""
        self._usage.tick()
        self._outgoing.pump()
        if self._returning:
            self._returning.send()
        _save_run_id(self._settings, self._board.run_id)
        await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Send what is left, and free everything. An evaluation under way is dropped; the next life runs it again."""
        for job in self._running.values():
            job.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for server in self._servers.values():
            await server.close()
        self._usage.tick(force=True)
        try:
            self._producer.flush(5)
        except BrokerError as error:
            self._log.warning("kafka is away", error=str(error))
        if self._returning:
            self._returning.close()
        await asyncio.to_thread(self._board.close)

    async def _run(self, job: Job) -> None:
        result = await self._evaluator.run(job)
        self._servers[job.kind].keep([job.version])
        if job.kind == "full":  # they are rare: its weights and caches take no memory in between
            await self._servers[job.kind].close()
        self._log.info(
            "evaluated",
            version=result.end_version,
            kind=result.kind,
            score=result.score,
            num_scored=result.num_scored,
            num_unscored=result.num_unscored,
            reason=result.reason,
            passed_over=list(job.passed_over),
        )

    def _server(self, settings: Settings, kind: Kind) -> Server:
        name = settings.evaluator.engine
        wanted = Wanted(settings, settings.evaluator.threads, f"{self._telemetry.instance}-{kind}")
        cache = settings.run.folder / "cache" / "evaluator" / kind
        return Server(self._store, make_engine(name, wanted), cache, serving_precision(settings, name))

    def _health(self) -> tuple[bool, str]:
        if self._outgoing.error:
            return False, f"Kafka takes no results: {self._outgoing.error}"
        if self._returning and self._returning.fault:
            return False, self._returning.fault
        champion = self._evaluator.champion
        best = f"; champion {champion.end_version}, {champion.score:.3f} of {champion.num_scored}" if champion else ""
        return True, f"judged up to version {self._evaluator.last}{best}"


async def evaluate(evaluation: Evaluation, stop: Stop) -> None:
    """Judge versions until `stop` is set."""
    verbs = [asyncio.create_task(_forever(evaluation, name)) for name in ("judge", "report")]
    try:
        while not stop and not any(verb.done() for verb in verbs):
            await asyncio.sleep(_POLL_S / 2)
        for verb in verbs:
            verb.cancel()
        for outcome in await asyncio.gather(*verbs, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
    finally:
        await evaluation.close()


async def _forever(evaluation: Evaluation, name: str) -> None:
    while True:
        await getattr(evaluation, name)()


def _run_id(settings: Settings) -> str | None:
    path = settings.run.folder / "evaluator.mlflow"
    return path.read_text().strip() if path.exists() else None


def _save_run_id(settings: Settings, run_id: str | None) -> None:
    if run_id is not None and run_id != _run_id(settings):
        (settings.run.folder / "evaluator.mlflow").write_text(run_id)


def run(settings: Settings, telemetry: Telemetry, stop: Stop) -> None:
    """Put the evaluator together and run it, behind everything else that wants the processor."""
    os.nice(_NICENESS)
    try_families(settings.families, settings.run.seed)
    asyncio.run(evaluate(Evaluation(settings, telemetry), stop))


if __name__ == "__main__":
    main(Service.EVALUATOR, run)
