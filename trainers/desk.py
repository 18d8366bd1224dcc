"""Rank 0's desk: follows the lake and the orders, decides each step for all ranks, writes down what came of it."""

import time
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from infra.control import directives
from infra.failpoints import hit
from infra.kafka import Producer, cluster_id
from infra.lake import Lake
from infra.lease import Lease
from infra.telemetry import Stop, Telemetry, logger
from infra.tracking import Tracking
from infra.turns import Own, device_turn
from infra.weights import WeightStore
from schemas.messages import Probe
from schemas.settings import Settings
from trainers.batches import Tokens, num_action_tokens
from trainers.checkpoint import Checkpoint, Checkpoints, Incarnation, State
from trainers.credit import ProcessScale, Turns, process_weight
from trainers.directives import Directives
from trainers.engine import Trained
from trainers.lora import description
from trainers.metrics import summarize
from trainers.objectives.kl import adapted
from trainers.publish import Publisher, is_due, manifest
from trainers.records import Step, begins_at, engine_mismatch, lineage, rates, sample_rows, step_row
from trainers.reports import Reports, numbers
from trainers.run_record import RunRecord
from trainers.signals import Signals, signals
from trainers.stream import Batch, ExperienceStream
from trainers.watchdog import Watchdog, explain


@dataclass(frozen=True, slots=True)
class Order:
    """What all ranks do next: train on `tokens`, the global batch, wait, or end. `save` and `publish` follow a step."""

    kind: Literal["train", "wait", "end"]
    tokens: Tokens | None = None
    signals: Signals | None = None
    num_tokens: int = 0
    learning_rate: float = 0.0
    kl: float = 0.0
    save: bool = False
    publish: bool = False


class Desk:
    """Owns all that the learner has outside DeepSpeed; exists on rank 0 only."""

    def __init__(
        self,
        settings: Settings,
        telemetry: Telemetry,
        lease: Lease,
        found: Checkpoint | None,
        ranks: int,
        max_positions: int | None,
    ):
        self._settings, self._learner, self._lease = settings, settings.learner, lease
        self._log = logger("learner", telemetry.instance)
        self._lake = Lake.of(settings)
        self._lake.ensure()
        self._producer = Producer(settings.kafka, telemetry.instance)
        self._control = directives(settings.kafka, telemetry.instance)
        self._directives = Directives(self._control)
        turn = device_turn(settings)
        self._turn = turn or Own()
        self._reports = Reports(settings, telemetry, self._producer, ranks, turn)
        self._stream = ExperienceStream(self._lake, settings, found.cursor if found else None, max_positions)
        state = found.state if found else State()
        self._tracking = Tracking(settings, settings.run.name, state.mlflow_run)
        weights = WeightStore.of(settings)
        self._publisher = Publisher(weights, self._producer, self._tracking, settings.run.folder / "base")
        self._record = RunRecord(settings, self._lake, weights, cluster_id(settings.kafka))
        self._checkpoints = checkpoints(settings, lease)
        self._state = _reborn(state, settings, ranks, self._tracking.run_id, begins_at(self._lake, datetime.now(UTC)))
        self._saved_step = state.step if found else -1
        self._app_id = f"learner/{self._state.incarnations[-1].name}"
        self._watchdog = Watchdog(self._learner.watchdog_s, time.monotonic())
        self._step: Step | None = None
        self._idle_since = time.monotonic()
        if found:
            self._publisher.publish(found)
            self._publisher.remind()
            self._record.catch_up(found)

    @property
    def state(self) -> State:
        """What the learner is after its last step."""
        return self._state

    def next(self, stop: Stop) -> Order:
        """The next order; within a second, so that no rank waits in the dark.

        Raises:
            LakeError: another learner has taken over.
        """
        self._turn.release()  # the step before is over, with its checkpoint and publication
        deadline = time.monotonic() + 1.0
        while not stop and self._state.step < self._learner.num_train_steps:
            if self._lease.is_fresh() and (batch := self._draw()) is not None:
                return self._train(batch)
            if time.monotonic() >= deadline:
                return Order("wait")
            stop.wait(self._learner.poll_s)
        return Order("end", save=self._state.step > self._saved_step)

    def record(self, trained: Trained, num_tokens: int, busy_s: float) -> None:
        """Write down the step that the last order was for."""
        step = self._step
        if step is None:
            raise RuntimeError("no step was ordered")
        metrics, per_row = summarize(trained.sums, step.signals.sample_weights)
        row = step_row(step, metrics, trained.turns, num_tokens, trained.grad_norm, busy_s)
        life = self._state.incarnations[-1]
        stamp = lineage(life, self._settings.objective.name, self._tracking.run_id)
        samples = sample_rows(step, life.name, per_row, trained.turns)
        self._lake.append("train_samples", samples, self._app_id, step.number)
        self._lake.append("train_steps", [row | stamp | {"finished_at": datetime.now(UTC)}], self._app_id, step.number)
        kl = adapted(self._kl, metrics.kl, self._settings.objective.kl_target)
        changes = {"step": step.number, "mlflow_run": self._tracking.run_id, "kl_coefficient": kl}
        changes |= {"process_scale": step.process_scale}
        self._state = self._state.model_copy(update=changes)
        mismatch = engine_mismatch(step, self._state.published_step, per_row)
        shown = numbers(row | rates(row) | {"engine_mismatch": mismatch})
        self._tracking.metrics({f"train/{name}": value for name, value in shown.items()}, step.number)
        self._reports.step(shown | self._stream.lengths.take())
        self._idle_since = time.monotonic()
        hit("learner.after_step")

    def busy(self) -> AbstractContextManager[None]:
        """Count the time inside as the accelerators' work."""
        return self._reports.usage.busy()

    def begin_checkpoint(self, publish: bool) -> Path:
        """The folder of a checkpoint of the state now, with a new weight version if it is to be published."""
        if publish:
            changes = {"weight_version": self._state.weight_version + 1, "published_step": self._state.step}
            self._state = self._state.model_copy(update=changes)
        return self._checkpoints.begin(self._state.step, self._state.weight_version)

    def finish_checkpoint(self, folder: Path, probe: Probe, publish: bool) -> None:
        """Make the checkpoint in `folder` whole; only then publish what it made, and write down what belongs to it."""
        state = self._state
        if publish:
            made = manifest(folder, state, self._stream.delta_version, probe, datetime.now(UTC))
            state = state.model_copy(update={"publication": made})
        self._lease.confirm()
        hit("learner.before_manifest")
        try:
            saved = self._checkpoints.complete(folder, state, self._stream.cursor())
        except FileNotFoundError:
            self._lease.confirm()  # who took over has removed the folder
            raise
        self._saved_step = state.step
        hit("learner.after_checkpoint")
        self._lease.confirm()  # a checkpoint made whole before a take-over is where that goes on: it publishes the same
        self._publisher.publish(saved)
        hit("learner.before_run_manifest")
        self._record.write(saved)
        if publish:
            self._reports.published()
        self._idle_since = time.monotonic()
        hit("learner.after_publish")

    def close(self) -> None:
        """Send what is queued, and leave."""
        self._reports.usage.tick(force=True)
        self._tracking.close()
        self._control.close()
        self._producer.close()

    @property
    def _kl(self) -> float:
        """The coefficient of the KL term now."""
        known = self._state.kl_coefficient
        return self._settings.objective.kl if known is None else known

    def _draw(self) -> Batch | None:
        """A batch if there is one and it is time for it; reports in passing."""
        version, now = self._state.weight_version, time.monotonic()
        self._take_in(version)
        orders = self._directives.poll(self._state.weight_version, self._settings.loop.max_staleness)
        self._publisher.tell()
        self._reports.tick(self._stream, self._state.step, version)
        if orders.paused:
            self._watchdog.feed(now)
            self._reports.health(True, f"paused by directive {orders.directive_id}")
            return None
        if now - self._idle_since < self._learner.min_update_s:
            return None
        if not self._turn.take():
            self._reports.health(not self._watchdog.is_late(now), "waiting for the card: the vLLM server samples on it")
            return None
        batch = self._stream.take(version, orders.bucket_weights, orders.min_weight_version)
        if batch is None:
            self._turn.release()
            self._watch(now)
            return None
        self._watchdog.feed(now)
        self._reports.health(True)
        return batch

    def _take_in(self, version: int) -> None:
        """Read what is new in the lake; trajectories that no step can hold are named."""
        before = self._stream.dropped["too_long"]
        self._stream.poll(version)
        if (dropped := self._stream.dropped["too_long"]) > before:
            self._log.warning("longer than the policy has positions", dropped=dropped, last=self._stream.too_long[:10])

    def _watch(self, now: float) -> None:
        if not self._watchdog.is_late(now):
            self._reports.health(True)
        elif self._watchdog.is_due(now):
            waited, last = now - self._watchdog.fed_at, self._stream.last_admitted_at
            needed = self._settings.loop.batch_size
            self._reports.health(False, explain(waited, self._stream.num_available, needed, last, datetime.now(UTC)))

    def _train(self, batch: Batch) -> Order:
        state, orders = self._state, self._directives.orders
        number, version = state.step + 1, state.weight_version
        publish = is_due(self._learner, number, state.published_step)
        rate = self._learner.learning_rate * orders.learning_rate_scale
        rate *= min(1.0, number / max(self._learner.warmup_steps, 1))
        wait_s = time.monotonic() - self._idle_since
        published = version + 1 if publish else None
        made, credit = self._credit(batch, number)
        self._step = Step(number, version, published, rate, orders, batch, made, *credit, wait_s)
        num_tokens = int(num_action_tokens(batch.tokens).sum())
        return Order("train", batch.tokens, made, num_tokens, rate, self._kl, publish, publish)

    def _credit(self, batch: Batch, number: int) -> tuple[Signals, tuple[float, ProcessScale]]:
        """The signals of `batch`; what its process rewards were multiplied by, and the scale with them in it."""
        scale, weight = self._state.process_scale, process_weight(number, self._settings.credit)
        turns = Turns.of(batch.rows, batch.tokens)
        if weight:
            scale = scale.after(batch.rows["reward"].to_numpy(), turns.rewards)
        factor = weight * scale.factor
        made = signals(batch.rows, batch.tokens, turns, self._settings, factor, batch.probabilities)
        return made, (factor, scale)


def checkpoints(settings: Settings, lease: Lease) -> Checkpoints:
    """The checkpoints of a run, for the holder of `lease`."""
    return Checkpoints(settings.checkpoints, settings.learner.keep_checkpoints, lambda: datetime.now(UTC), lease.fence)


def _reborn(state: State, settings: Settings, world_size: int, mlflow_run: str | None, at: datetime) -> State:
    """`state` as a new incarnation begins with it, at `at`."""
    life = Incarnation(name=uuid.uuid4().hex[:12], resumed_from_step=state.step, started_at=at)
    changes = {"incarnations": (*state.incarnations, life), "publication": None, "mlflow_run": mlflow_run}
    changes |= {"value_head": settings.credit.baseline == "value", "lora": description(settings.learner)}
    return state.model_copy(update=changes | {"world_size": world_size, "zero_stage": settings.learner.zero_stage})
