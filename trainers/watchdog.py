"""A wait for data that ends in words: after its limit it says what is missing, and that the learner goes on waiting."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(slots=True)
class Watchdog:
    """Speaks up when no batch has come for `limit_s` seconds, and again each further `limit_s`. Times are monotonic."""

    limit_s: float
    fed_at: float
    alarms: int = 0

    def feed(self, now: float) -> None:
        """A batch came."""
        self.fed_at, self.alarms = now, 0

    def is_late(self, now: float) -> bool:
        """Whether the limit is over."""
        return now - self.fed_at >= self.limit_s

    def is_due(self, now: float) -> bool:
        """Whether a new alarm is due."""
        due = int((now - self.fed_at) // self.limit_s)
        news, self.alarms = due > self.alarms, max(due, self.alarms)
        return news


def explain(waited_s: float, available: int, needed: int, last_admitted_at: datetime | None, now: datetime) -> str:
    """Why there is no batch, and what happens now."""
    age = "no row was ever admitted"
    if last_admitted_at is not None:
        age = f"the last row was admitted {max(0.0, (now - last_admitted_at).total_seconds()):.0f} s ago"
    state = "empty" if not available else "short"
    return (
        f"no batch for {waited_s:.0f} s: buffer {state} ({available} of {needed} trajectories), {age}. "
        "Decision: wait on, steps resume by themselves. See the rollout services and curate: `lagoon doctor`"
    )
