"""How much may be under way: trajectories in open groups, on their way to the learner, or waiting there."""

from dataclasses import dataclass, field

from schemas.settings import Settings

DECREASE = 0.5
STALE_SHARE = 0.1
"""More than this share of new outcomes stale means that too much is under way."""


def staleness_limit(batch_size: int, max_staleness: int, sync_interval: int) -> int:
    """Most trajectories that can still be trained on in time: max_staleness + 1 versions of `sync_interval` batches.

    It depends on what is under way now, never on a version or on counts since the start: a run that resumes at version
    100 has the limit of one that begins.
    """
    return (max_staleness + 1) * batch_size * sync_interval


@dataclass(slots=True)
class Supply:
    """The window that open groups and unused trajectories have to fit into, and what it is steered by.

    `admitted` and `outcomes` are totals over all shards; `history` holds (ms, admitted) since the learner's last
    report, to tell what it cannot have counted yet.
    """

    window: float
    available: int = 0
    reported_ms: int = 0
    admitted: int = 0
    outcomes: int = 0
    stale: int = 0
    seen_outcomes: int = 0
    seen_stale: int = 0
    history: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, settings: Settings) -> "Supply":
        """The window at the start: what `updates_ahead` updates need, within the limit."""
        return cls(_clamped(settings.dispatch.updates_ahead * settings.loop.batch_size, settings))

    def note_time(self, now_ms: int) -> None:
        """Remember how much had been admitted by now."""
        if not self.history or self.history[-1][1] != self.admitted:
            self.history.append((now_ms, self.admitted))
        while len(self.history) > 1 and self.history[1][0] <= self.reported_ms:
            self.history.pop(0)

    def shift(self, by_ms: int) -> None:
        """Follow a clock that was set."""
        self.history = [(at_ms + by_ms, admitted) for at_ms, admitted in self.history]
        self.reported_ms += by_ms

    def note_learner(self, available: int, at_ms: int, settings: Settings) -> None:
        """Take in the learner's count, heard at `at_ms` by the clock of `note_time`, and steer.

        Additive increase while it lacks a batch; multiplicative decrease while it has more than `updates_ahead` of
        them, or while much of what comes is stale.
        """
        self.available, self.reported_ms = available, at_ms - round(2000 * settings.curate.epoch_s)
        new_outcomes, new_stale = self.outcomes - self.seen_outcomes, self.stale - self.seen_stale
        self.seen_outcomes, self.seen_stale = self.outcomes, self.stale
        batch = settings.loop.batch_size
        if available > settings.dispatch.updates_ahead * batch or new_stale > STALE_SHARE * max(new_outcomes, 1):
            self.window = _clamped(self.window * DECREASE, settings)
        elif available < batch:
            self.window = _clamped(self.window + settings.loop.group_size, settings)

    @property
    def in_transit(self) -> int:
        """Admitted after what the learner had counted: two epochs before its report, since commits take that long."""
        counted = [total for at_ms, total in self.history if at_ms <= self.reported_ms]
        return max(0, self.admitted - (counted[-1] if counted else 0))

    def num_groups(self, num_open: int, group_size: int) -> int:
        """How many more groups may be opened."""
        room = self.window - self.available - self.in_transit - num_open * group_size
        return max(0, int(room // group_size))


def _clamped(window: float, settings: Settings) -> float:
    loop = settings.loop
    limit = staleness_limit(loop.batch_size, loop.max_staleness, settings.learner.sync_interval_start)
    return min(max(window, float(loop.batch_size)), float(limit))
