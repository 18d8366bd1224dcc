"""State of a shard: ids, scores and counts, never payloads. Plain, bounded, and pickled once an epoch."""

from dataclasses import dataclass, field
from hashlib import blake2b

from flows.steps.difficulty import Posterior
from flows.steps.eviction import Live
from flows.steps.groups import ClosedGroup, OpenGroup
from flows.steps.purse import Purse
from flows.steps.stored import Stored
from flows.steps.tally import Tally

MAX_IMPORTS = 16_384
MAX_TASKS = 65_536


@dataclass(slots=True)
class State(Stored):
    """What a shard knows. Open groups lie in order of opening, closed ones in order of closing."""

    FLOW = "curate"
    FORMAT = 3

    now_ms: int = 0
    learner_version: int = 0
    min_weight_version: int = 0
    bucket_weights: tuple[float, ...] = ()
    directive_id: str | None = None
    open: dict[str, OpenGroup] = field(default_factory=dict)
    closed: dict[str, ClosedGroup] = field(default_factory=dict)
    imports: dict[bytes, None] = field(default_factory=dict)
    posteriors: dict[str, Posterior] = field(default_factory=dict)
    live: Live = field(default_factory=Live)
    tally: Tally = field(default_factory=Tally)
    purse: Purse = field(default_factory=Purse)

    @property
    def num_pending(self) -> int:
        """Members whose outcome waits for their group's close."""
        return sum(len(group.pending) for group in self.open.values())

    def known_ids(self) -> set[bytes]:
        """Ids of all members of the groups that are remembered."""
        known = {id_ for group in self.open.values() for id_ in group.ids}
        for group in self.closed.values():
            known.update(each_id(group))
        return known

    def imported_before(self, content_hash: str) -> bool:
        """Whether an import of this content is known; it is from now on."""
        content = blake2b(content_hash.encode(), digest_size=8).digest()
        if content in self.imports:
            return True
        self.imports[content] = None
        if len(self.imports) > MAX_IMPORTS:
            del self.imports[next(iter(self.imports))]
        return False

    def set_posterior(self, task_id: str, posterior: Posterior) -> None:
        """Keep `posterior`; beyond MAX_TASKS the one that changed longest ago is dropped."""
        self.posteriors.pop(task_id, None)
        self.posteriors[task_id] = posterior
        self.tally.changed_tasks[task_id] = None
        if len(self.posteriors) > MAX_TASKS:
            del self.posteriors[next(iter(self.posteriors))]


def each_id(group: ClosedGroup) -> list[bytes]:
    """Ids of the members of a closed group."""
    return [group.ids[i : i + 16] for i in range(0, len(group.ids), 16)]
