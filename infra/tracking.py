"""MLflow beside the training, never in its way: a queue with a bound, one thread that empties it.

A slow or dead server costs metrics, oldest first, never a training step; what is lost is counted and logged. The lake
holds the same figures for ever.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from prometheus_client import Counter

from infra.logs import logger
from schemas.settings import Settings

MAX_POINTS = 20_000
"""Metric points kept while the server is away; beyond that the oldest go."""

LATEST = "latest"

_BATCH = 500
_RETRY_S = 2.0
_FAILURES = Counter("lagoon_tracking_failures", "Requests to MLflow that failed")
_DROPPED = Counter("lagoon_tracking_dropped", "Metric points that never reached MLflow")


@dataclass(frozen=True, slots=True)
class Point:
    """A metric's value at an optimizer step, or at a weight version."""

    key: str
    value: float
    step: int
    at_ms: int


class Tracking:
    """A run in MLflow. No method blocks or raises, but for `close`, which has a limit.

    With `resume_run_id` the run goes on; steps that it had logged before are not logged again.

    Attributes:
        run_id: of the run, once it is known; None without MLflow.
        num_failures: requests that failed.
        num_dropped: metric points that were given up.
    """

    def __init__(self, settings: Settings, run_name: str, resume_run_id: str | None = None, wait_s: float = 10):
        """Start the run and wait for its id, at most `wait_s` seconds; after that it goes on in the background."""
        self.run_id = resume_run_id
        self.num_failures = 0
        self.num_dropped = 0
        self._log = logger("tracking")
        self._points: deque[Point] = deque()
        self._versions: deque[Callable[[], None]] = deque()
        self._aliases: dict[str, int] = {}
        self._changed = threading.Condition()
        self._started = threading.Event()
        self._closing = False
        self._streak = 0
        self._thread: threading.Thread | None = None
        if settings.tracking.enabled and settings.tracking.uri:
            # the client's own patience, 7 retries of 2 minutes, would outlast `close`
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
            os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
            from infra.experiments import Experiment  # noqa: PLC0415 - mlflow is slow to import

            self._experiment = Experiment(settings, run_name)
            self._thread = threading.Thread(target=self._run, args=(resume_run_id,), name="tracking", daemon=True)
            self._thread.start()
            self._started.wait(wait_s)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Log `values` at `step`: an optimizer step, or for evals the weight version."""
        if self._thread is None:
            return
        at_ms = time.time_ns() // 1_000_000  # as MLflow stamps metrics
        with self._changed:
            self._points.extend(Point(key, float(value), step, at_ms) for key, value in values.items())
            overflow = max(0, len(self._points) - MAX_POINTS)
            for _ in range(overflow):
                self._points.popleft()
            self._changed.notify()
        self._drop(overflow)

    def weight_version(self, version: int, uri: str, tags: Mapping[str, str]) -> None:
        """Register a weight version with its lineage: fingerprint, train_step, delta_version, parent."""
        if self._thread is None:
            return
        with self._changed:
            self._versions.append(lambda: self._experiment.register(self.run_id, version, uri, tags))
            self._changed.notify()

    def alias(self, name: str, version: int) -> None:
        """Point an alias (`champion`) at a weight version, as soon as that is registered.

        MLflow keeps `latest` itself, as the version registered last, and lets nobody set it.
        """
        if self._thread is None or name == LATEST:
            return
        with self._changed:
            self._aliases[name] = version
            self._changed.notify()

    def close(self, timeout_s: float = 10) -> None:
        """Send what is queued for at most `timeout_s` seconds, and finish the run."""
        if self._thread is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._log.warning("mlflow does not answer", timeout_s=timeout_s, failures=self.num_failures)
        if self._points or self._versions or self._aliases:
            self._log.warning("not sent to mlflow", points=len(self._points), aliases=sorted(self._aliases))
            self._drop(len(self._points))
        self._thread = None

    def _run(self, resume_run_id: str | None) -> None:
        while not self._try(partial(self._start, resume_run_id)):
            if self._pause():
                return
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, timeout=_RETRY_S)
            sent = self._send()
            if self._closing and not (sent and (self._points or self._versions)):
                break
            if not sent:
                self._pause()
        self._try(lambda: self._experiment.finish(self.run_id or ""))

    def _start(self, resume_run_id: str | None) -> None:
        self.run_id = self._experiment.start(resume_run_id)
        self._started.set()

    def _send(self) -> bool:
        """Send one batch of points, the waiting versions and aliases; False if the server did not answer."""
        with self._changed:
            batch = [self._points.popleft() for _ in range(min(_BATCH, len(self._points)))]
        if batch and not self._try(lambda: self._experiment.log(self.run_id or "", batch), len(batch)):
            with self._changed:
                self._points.extendleft(reversed(batch))
            return False
        while self._versions:
            if not self._try(self._versions[0]):
                return False
            self._versions.popleft()
        return all([self._try(partial(self._set_alias, *alias)) for alias in list(self._aliases.items())])

    def _set_alias(self, name: str, version: int) -> None:
        if self._experiment.alias(name, version):
            with self._changed:
                if self._aliases.get(name) == version:
                    del self._aliases[name]

    def _try(self, request: Callable[[], None], num_points: int = 0) -> bool:
        """Whether `request` is over: done, or refused for good; its points are then dropped."""
        try:
            request()
        except Exception as error:  # whatever goes wrong here must not reach the training
            self._note(error)
            if is_permanent := self._experiment.is_permanent(error):
                self._drop(num_points)
            return is_permanent
        self._streak = 0
        return True

    def _note(self, error: Exception) -> None:
        self.num_failures += 1
        self._streak += 1
        _FAILURES.inc()
        if self._streak == 1 or self._streak % 30 == 0:
            text = f"{type(error).__name__}: {error}"[:500]
            self._log.warning("mlflow request failed", error=text, failures=self.num_failures)

    def _has_work(self) -> bool:
        return bool(self._points or self._versions) or self._closing

    def _pause(self) -> bool:
        """Wait before the next try; True as soon as the run is closing."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing, timeout=_RETRY_S)

    def _drop(self, num_points: int) -> None:
        if num_points:
            self.num_dropped += num_points
            _DROPPED.inc(num_points)
