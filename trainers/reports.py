"""What the learner shows of itself while it runs: buffer reports, usage, metrics, health."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime

from prometheus_client import Counter, Gauge

from infra.kafka import Producer
from infra.telemetry import Telemetry, logger
from infra.usage import Usage
from schemas.messages import LearnerReport
from schemas.names import Phase, Service
from schemas.settings import Settings
from schemas.topics import BUFFER
from trainers.stream import ExperienceStream

REPORT_S = 1.0
MAX_IMPORTANCE_RATIO = 10.0
MIN_EFFECTIVE_SAMPLE_RATIO = 0.3

_STEP = Gauge("lagoon_train_step", "Optimizer steps done")
_VERSION = Gauge("lagoon_learner_weight_version", "Weight version that was published last")
_AVAILABLE = Gauge("lagoon_learner_available", "Trajectories that may still be trained on")
_DROPPED = Gauge("lagoon_learner_dropped", "Trajectories that the learner dropped, since its start", ["reason"])
_STALLED = Gauge("lagoon_learner_stalled", "1 while the watchdog has no batch to train on")
_METRIC = Gauge("lagoon_train_metric", "Figures of the last optimizer step", ["name"])
_TRAINED = Counter("lagoon_trained_trajectories", "Trajectories trained on, since the start of the process")
_TOKENS = Counter("lagoon_trained_tokens", "Action tokens trained on, since the start of the process")


class Reports:
    """Sends a LearnerReport about every second and usage intervals as they end; keeps metrics and health."""

    def __init__(self, settings: Settings, telemetry: Telemetry, producer: Producer, world_size: int):
        self._telemetry, self._producer = telemetry, producer
        self._log = logger(Service.LEARNER, telemetry.instance)
        self._needs = settings.loop.batch_size
        self._sent_at = float("-inf")
        interval = settings.telemetry.usage_s
        self.usage = Usage(
            producer, Service.LEARNER, telemetry.instance, Phase.TRAIN, interval, num_accelerators=world_size
        )

    def step(self, figures: Mapping[str, float]) -> None:
        """Count a finished step, and warn of figures beyond the alarm levels."""
        self.usage.add(tokens=int(figures["num_tokens"]))
        _TRAINED.inc(figures["num_trajectories"])
        _TOKENS.inc(figures["num_tokens"])
        for name, value in figures.items():
            _METRIC.labels(name).set(value)
        for reason in alarms(figures):
            self._log.warning("alarm", reason=reason, step=int(figures["step"]))

    def health(self, ok: bool, reason: str = "") -> None:
        """Report health; red means that there is nothing to train on."""
        _STALLED.set(not ok)
        self._telemetry.health(ok, reason)

    def tick(self, stream: ExperienceStream, step: int, version: int) -> None:
        """Report what is due."""
        self.usage.version(version)
        self.usage.tick()
        now = time.monotonic()
        if now - self._sent_at >= REPORT_S:
            self._sent_at = now
            self._report(stream, step, version)
        self._producer.poll()

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


def alarms(figures: Mapping[str, float]) -> list[str]:
    """Signs that the samples are too far from the policy that learns from them."""
    found: list[str] = []
    if (ratio := figures["importance_ratio_max"]) > MAX_IMPORTANCE_RATIO:
        found.append(f"importance ratio {ratio:.1f} is above {MAX_IMPORTANCE_RATIO:g}")
    if (share := figures["effective_sample_ratio"]) < MIN_EFFECTIVE_SAMPLE_RATIO:
        found.append(f"effective sample ratio {share:.2f} is below {MIN_EFFECTIVE_SAMPLE_RATIO:g}")
    return found


def numbers(row: Mapping[str, object]) -> dict[str, float]:
    """The numeric figures of a row, by name."""
    return {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
