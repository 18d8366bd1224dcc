"""What branches may still cost: a share of what ordinary episodes have sampled."""

from dataclasses import dataclass, field

from flows.steps.member import Member
from schemas.names import Origin

MAX_ASKED = 256
"""Forks under way that a shard remembers; beyond it the oldest counts as spent, whatever becomes of it."""


@dataclass(slots=True)
class Purse:
    """Action tokens: `produced` by ordinary episodes, `spent` on branches that came, `asked` for those under way.

    `asked` maps branches' groups to what they are expected to cost. `worth` is the sum over the `num_seen` turns that
    could have been forked so far.
    """

    produced: int = 0
    spent: float = 0.0
    asked: dict[str, float] = field(default_factory=dict)
    worth: float = 0.0
    num_seen: int = 0

    def count(self, member: Member) -> None:
        """A trajectory has come."""
        self.produced += member.num_generated_tokens * (member.origin == Origin.ROLLOUT)
        self.spent += member.num_generated_tokens * (member.origin == Origin.COUNTERFACTUAL)

    def left(self, budget: float) -> float:
        """What may still be asked for."""
        return budget * self.produced - self.spent - sum(self.asked.values())

    def ask(self, group_id: str, cost: float) -> None:
        """Branches that are expected to cost `cost` are asked for."""
        self.asked[group_id] = cost
        if len(self.asked) > MAX_ASKED:
            self.spent += self.asked.pop(next(iter(self.asked)))

    def settle(self, group_id: str, scored: bool) -> None:
        """The branches have come, and their cost with them. Where none has a reward, what was expected stays spent.

        So a task whose episodes cannot be replayed is not tried for ever.
        """
        cost = self.asked.pop(group_id, 0)
        self.spent += 0 if scored else cost

    def typical(self, worths: list[float]) -> float:
        """The mean worth of all turns so far, `worths` among them."""
        self.worth += sum(worths)
        self.num_seen += len(worths)
        return self.worth / max(self.num_seen, 1)
