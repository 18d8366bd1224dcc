"""What the learner shows of itself while it runs: buffer reports, usage, metrics, health."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime

from prometheus_client import Counter, Gauge

from infra.kafka import Producer
from infra.telemetry import Telemetry, logger
from infra.turns import Turn
from infra.usage import Usage
from schemas.messages import LearnerReport
from schemas.names import Phase, Service
from schemas.settings import Settings
from schemas.topics import BUFFER
from trainers.alarms import Alarms
from trainers.stream import ExperienceStream

REPORT_S = 1.0
LATE_WATCHDOGS = 5
LATE_INTERVALS = 3
"""Weights are late after this many watchdog limits, and this many publication intervals of the longest step so far."""

_STEP = Gauge("lagoon_train_step", "Optimizer steps done")
_VERSION = Gauge("lagoon_learner_weight_version", "Weight version that was published last")
_AVAILABLE = Gauge("lagoon_learner_available", "Trajectories that may still be trained on")
_DROPPED = Gauge("lagoon_learner_dropped", "Trajectories that the learner dropped, since its start", ["reason"])
_STALLED = Gauge("lagoon_learner_stalled", "1 while the watchdog has no batch to train on")
_METRIC = Gauge("lagoon_train_metric", "Figures of the last optimizer step", ["name"])
_TRAINED = Counter("lagoon_trained_trajectories", "Trajectories trained on, since the start of the process")
_TOKENS = Counter("lagoon_trained_tokens", "Action tokens trained on, since the start of the process")


class Reports:
    """Sends a LearnerReport about every second and usage intervals as they end; keeps metrics and health.

    `turn` is that on a shared card: its time alone is the learner's.
    """

    def __init__(
        self, settings: Settings, telemetry: Telemetry, producer: Producer, world_size: int, turn: Turn | None = None
    ):
        self._telemetry, self._producer = telemetry, producer
        self.alarms = Alarms(logger(Service.LEARNER, telemetry.instance))
        self._max_staleness, self._learner = settings.loop.max_staleness, settings.learner
        self._published_at, self._longest_s = time.monotonic(), 0.0
        self._needs = settings.loop.batch_size
        self._sent_at = float("-inf")
        self.usage = Usage(
            producer,
            Service.LEARNER,
            telemetry.instance,
            Phase.TRAIN,
            settings.telemetry.usage_s,
            num_accelerators=world_size,
            own_s=turn.own_s if turn else None,
        )

    def step(self, figures: Mapping[str, float]) -> None:
        """Count a finished step, and let the alarms look at it."""
        self.usage.add(tokens=int(figures["num_tokens"]))
        _TRAINED.inc(figures["num_trajectories"])
        _TOKENS.inc(figures["num_tokens"])
        for name, value in figures.items():
            _METRIC.labels(name).set(value)
        self._longest_s = max(self._longest_s, figures["wait_s"] + figures["busy_s"])
        self.alarms.step({**figures, "tokens_per_trajectory": figures["num_tokens"] / figures["num_trajectories"]})

    def published(self) -> None:
        """A weight version has been published."""
        self._published_at = time.monotonic()

    def health(self, ok: bool, reason: str = "") -> None:
        """Report health; red means that there is nothing to train on."""
        _STALLED.set(not ok)
        self.alarms.state("empty_buffer", "" if ok else reason)
        self._telemetry.health(ok, reason)

    def tick(self, stream: ExperienceStream, step: int, version: int) -> None:
        """Report what is due."""
        self.usage.version(version)
        self.usage.tick()
        now = time.monotonic()
        if now - self._sent_at >= REPORT_S:
            self._sent_at = now
            self._report(stream, step, version)
            self.alarms.state("policy_lag", lag_fault(version, stream.newest_version, self._max_staleness))
            self.alarms.state("no_new_weights", self._late(now - self._published_at))
        self._producer.poll()

    def _late(self, since_s: float) -> str:
        usual_s = LATE_INTERVALS * self._learner.sync_interval * self._longest_s
        late = since_s > max(LATE_WATCHDOGS * self._learner.watchdog_s, usual_s)
        return f"no weight version was published for {since_s:.0f} s" if late else ""

    def _report(self, stream: ExperienceStream, step: int, version: int) -> None:
        _STEP.set(step)
        _VERSION.set(version)
        _AVAILABLE.set(stream.num_available)
        for reason, count in stream.dropped.items():
            _DROPPED.labels(reason).set(count)
        report = LearnerReport(
            at=datetime.now(UTC),
            weight_version=version,
            train_step=step,
            num_available=stream.num_available,
            num_consumed=stream.num_consumed,
            needs_per_step=self._needs,
        )
        self._producer.send(BUFFER.name, Service.LEARNER, report.to_bytes(), on_delivery=lambda _: None)


def lag_fault(version: int, newest: int | None, max_staleness: int) -> str:
    """Why the services' weights are too old, or nothing; `newest` is the newest version seen in an admitted row."""
    if newest is None or version - newest <= max_staleness:
        return ""
    return f"the newest trajectory is of version {newest}, {version - newest} behind; at most {max_staleness} is of use"


def numbers(row: Mapping[str, object]) -> dict[str, float]:
    """The numeric figures of a row, by name."""
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
