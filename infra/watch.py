"""The state of a running loop, from its topics alone: what the demo and `lagoon status` show."""

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

from infra.kafka import Follower
from schemas import topics
from schemas.messages import BufferMessage, BufferReport, EvalResult, LearnerReport, UsageInterval, WeightSummary
from schemas.names import OUTCOMES, Phase
from schemas.settings import Settings

RATE_WINDOW_S = 10.0


@dataclass
class Rate:
    """Events per second over the last RATE_WINDOW_S seconds of an absolute counter."""

    points: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, total: float, now: float) -> None:
        """Note that the counter stood at `total` at `now` (monotonic seconds)."""
        self.points.append((now, total))
        while now - self.points[0][0] > RATE_WINDOW_S:
            self.points.popleft()

    @property
    def per_s(self) -> float:
        """Events per second, 0 before two points."""
        (start, first), (end, last) = (self.points[0], self.points[-1]) if self.points else ((0.0, 0.0), (0.0, 0.0))
        return (last - first) / (end - start) if end > start else 0.0


@dataclass
class LoopState:
    """The loop's figures now. Counters are absolute, rates are per second."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    pending: int = 0
    live: int = 0
    weight_version: int = 0
    train_step: int = 0
    available: int = 0
    episodes: int = 0
    tokens: int = 0
    failed: int = 0
    evals: list[EvalResult] = field(default_factory=list[EvalResult])
    busy_s: Counter[str] = field(default_factory=Counter[str])
    rollout_rate: Rate = field(default_factory=Rate)
    train_rate: Rate = field(default_factory=Rate)
    eval_rate: Rate = field(default_factory=Rate)

    @property
    def scored(self) -> list[EvalResult]:
        """Evaluations with a score, by the version that was evaluated."""
        return sorted((e for e in self.evals if e.score is not None), key=lambda e: e.end_version)


class Watch:
    """Follows a run's small topics and keeps a LoopState."""

    def __init__(self, settings: Settings, with_usage: bool = True) -> None:
        """Start at the beginning of each topic: figures are absolute, so nothing is counted twice.

        Without usage there are no `episodes`, `tokens`, `failed` and `busy_s`, which are sums over all of a long topic.
        """
        follow = partial(Follower, settings.kafka, client_id="watch")
        self.state = LoopState()
        self._weights = follow(topics.WEIGHTS.name, WeightSummary)
        self._evals = follow(topics.EVALS.name, EvalResult)
        self._usage = follow(topics.USAGE.name, UsageInterval) if with_usage else None
        self._buffer = follow(topics.BUFFER.name, BufferMessage, newest=True)
        self._reports: dict[str, BufferReport] = {}
        self._intervals: set[str] = set()  # an interval may be sent twice

    def poll(self) -> LoopState:
        """Take in what is new and return the state."""
        state, now = self.state, time.monotonic()
        for summary in self._weights.poll():
            state.weight_version = max(state.weight_version, summary.version)
        state.evals.extend(self._evals.poll())
        for message in self._buffer.poll():
            report = message.root
            if isinstance(report, BufferReport):
                self._reports[report.shard] = report
            elif isinstance(report, LearnerReport):
                state.train_step, state.available = report.train_step, report.num_available
        for interval in self._usage.poll() if self._usage else ():
            if interval.interval_id in self._intervals:
                continue
            self._intervals.add(interval.interval_id)
            state.busy_s[interval.phase] += interval.busy_s
            if interval.phase == Phase.ROLLOUT:
                state.episodes += interval.num_episodes
                state.tokens += interval.num_tokens
                state.failed += interval.num_failed
        state.outcomes = Counter({o: sum(r.trajectories.get(o, 0) for r in self._reports.values()) for o in OUTCOMES})
        state.pending = sum(r.num_pending for r in self._reports.values())
        state.live = sum(sum(r.live.values()) for r in self._reports.values())
        state.rollout_rate.add(state.episodes, now)
        state.train_rate.add(state.train_step, now)
        state.eval_rate.add(len(state.scored), now)
        return state

    def close(self) -> None:
        """Let go of the broker."""
        for follower in filter(None, (self._weights, self._evals, self._usage, self._buffer)):
            follower.close()
