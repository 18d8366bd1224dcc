"""What a service did with its accelerators: one interval at a time, never cumulative, but for an outbox's totals."""

import time
import uuid
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Any, Protocol

from schemas.errors import BrokerError
from schemas.messages import UsageInterval
from schemas.topics import USAGE

_MAX_UNSENT = 1000
_MAX_DRIFT = timedelta(seconds=1)


class Sender(Protocol):
    """The one method of `infra.kafka.Producer` that usage needs."""

    def send(
        self, topic: str, key: str, value: bytes, *, on_delivery: Callable[[BrokerError | None], None]
    ) -> None: ...


class Usage:
    """Sends a UsageInterval every `interval_s` on topic `usage`, when `tick` is called.

    `busy()` blocks may nest and overlap (also over threads): time counts once, so busy + idle is the interval's length
    times `num_accelerators`, never more. Of a shared accelerator only the time counts in which it was this service's:
    `own_s` says how many seconds ever. Intervals that Kafka did not take are sent again with their `interval_id`. The
    producer's owner polls it. Times come from a monotonic clock laid on UTC: intervals follow one another without
    overlap even where the wall clock is set back.
    """

    def __init__(
        self,
        producer: Sender,
        service: str,
        instance: str,
        phase: str,
        interval_s: float,
        *,
        num_accelerators: int = 1,
        own_s: Callable[[], float] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._producer, self._interval_us = producer, round(interval_s * 1e6)
        self._names = {"service": service, "instance": instance, "phase": phase}
        self._num_accelerators = num_accelerators
        self._clock, self._now, self._lock = clock, now, Lock()
        self._own_s, self._own_before_us = own_s, 0
        self._depth, self._busy_us = 0, 0
        self._start_us = self._seen_us = clock() // 1000
        self._started_at = now()
        self._counts = {"num_tokens": 0, "num_episodes": 0, "num_failed": 0}
        self._latest: dict[str, Any] = {}
        self._unsent: deque[UsageInterval] = deque(maxlen=_MAX_UNSENT)

    @contextmanager
    def busy(self) -> Generator[None]:
        """Count the time inside as busy."""
        self._enter(1)
        try:
            yield
        finally:
            self._enter(-1)

    def add(self, tokens: int = 0, episodes: int = 0, failed: int = 0) -> None:
        """Count into the open interval: tokens sampled or trained, episodes that ended, those of them that failed."""
        with self._lock:
            for name, count in (("num_tokens", tokens), ("num_episodes", episodes), ("num_failed", failed)):
                self._counts[name] += count

    def produced(self, outbox: str, trajectories: int, tokens: int) -> None:
        """Set what `outbox` has produced ever, counted from its log."""
        with self._lock:
            self._latest |= {"outbox": outbox, "produced_trajectories": trajectories, "produced_tokens": tokens}

    def version(self, version: int) -> None:
        """Set the weight version that is served or trained."""
        with self._lock:
            self._latest["weight_version"] = version

    def tick(self, force: bool = False) -> None:
        """Send the open interval if it is over, or in any case with `force`, and begin the next.

        Raises:
            BrokerError: the producer's queue stayed full.
        """
        with self._lock:
            self._account()
            due = self._seen_us - self._start_us >= (1 if force else self._interval_us)
            if due:
                self._unsent.append(self._close_interval())
            waiting = deque(self._unsent if due else ())
            self._unsent = self._unsent if not due else deque(maxlen=_MAX_UNSENT)
        try:
            while waiting:
                self._send(waiting[0])
                waiting.popleft()
        finally:
            self._unsent.extend(waiting)  # a full queue has not taken them

    def _enter(self, change: int) -> None:
        with self._lock:
            self._account()
            self._depth += change

    def _account(self) -> None:
        """Count the time since the last look as busy if a block is open."""
        now_us = max(self._seen_us, self._clock() // 1000)
        self._busy_us += now_us - self._seen_us if self._depth else 0
        self._seen_us = now_us

    def _close_interval(self) -> UsageInterval:
        length_us = self._seen_us - self._start_us
        ended_at = self._started_at + timedelta(microseconds=length_us)
        interval = UsageInterval(
            interval_id=str(uuid.uuid4()),
            **self._names,
            started_at=self._started_at,
            ended_at=ended_at,
            busy_s=self._busy_us * self._num_accelerators / 1e6,
            idle_s=(self._own_us(length_us) - self._busy_us) * self._num_accelerators / 1e6,
            num_accelerators=self._num_accelerators,
            **self._counts,
            **self._latest,
        )
        now = self._now()
        self._started_at = now if now - ended_at > _MAX_DRIFT else ended_at
        self._start_us, self._busy_us, self._counts = self._seen_us, 0, dict.fromkeys(self._counts, 0)
        return interval

    def _own_us(self, length_us: int) -> int:
        """How much of the interval the accelerators were this service's."""
        if self._own_s is None:
            return length_us
        before, self._own_before_us = self._own_before_us, round(self._own_s() * 1e6)
        return min(length_us, max(self._busy_us, self._own_before_us - before))

    def _send(self, interval: UsageInterval) -> None:
        def on_delivery(error: BrokerError | None) -> None:
            if error is not None:
                self._unsent.append(interval)

        self._producer.send(USAGE.name, self._names["instance"], interval.to_bytes(), on_delivery=on_delivery)
