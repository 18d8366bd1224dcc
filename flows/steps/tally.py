"""Totals of a shard, and what changed since its last report."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from flows.steps.ledger import Decision
from schemas.messages import ClosedGroup
from schemas.names import Event, Origin


@dataclass(slots=True)
class Tally:
    """Totals by event since the beginning of the log, and what changed since the last report."""

    trajectories: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    closed: list[ClosedGroup] = field(default_factory=list)
    changed_tasks: dict[str, None] = field(default_factory=dict)
    changed: bool = False
    num_branches: int = 0

    def count(self, decisions: Iterable[Decision]) -> None:
        """Count what trajectories met."""
        trajectories, tokens = self.trajectories, self.tokens
        for member, event, *_ in decisions:
            trajectories[event] = trajectories.get(event, 0) + 1
            tokens[event] = tokens.get(event, 0) + member.num_tokens
            self.num_branches += event == Event.ADMITTED and member.origin == Origin.COUNTERFACTUAL
            self.changed = True

    def close(self, group: ClosedGroup) -> None:
        """Note a closed group for the next report."""
        self.closed.append(group)
        self.changed = True
