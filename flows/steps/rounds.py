"""The synchronous twin: which groups are still to be opened for the step that the newest weights are to make."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.messages import LearnerReport, Task
from schemas.settings import Settings


@dataclass(slots=True)
class Round:
    """The samples of one weight version: a batch of them, and no more until the next version is announced.

    Groups that end without a signal, lost members and evicted ones are replaced at the same version, until a batch is
    admitted: dynamic sampling (DAPO, arXiv:2503.14476, section 3.2). So a step has the batch of an asynchronous one.

    Attributes:
        version: The weight version of the round.
        full_ms: Since when a batch is admitted and no group open; None while that is not so.
        lacks: Trajectories that the learner still lacks, by its own count, after the round was full for a lease.
    """

    version: int = 0
    full_ms: int | None = None
    lacks: int = 0

    def note_learner(self, report: LearnerReport, now_ms: int, settings: Settings) -> None:
        """Take in the learner's count: it may be unable to use what was admitted, and nobody waits for ever."""
        is_late = self.full_ms is not None and now_ms - self.full_ms >= settings.dispatch.lease_s * 1000
        if is_late and report.weight_version == self.version:
            self.lacks = max(0, settings.loop.batch_size - report.num_available)

    def shift(self, by_ms: int) -> None:
        """Follow a clock that was set."""
        self.full_ms = None if self.full_ms is None else self.full_ms + by_ms

    def num_groups(
        self, version: int, now_ms: int, live: Iterable[Mapping[int, int]], tasks: Iterable[Task], settings: Settings
    ) -> int:
        """How many more groups the round of `version` needs.

        `live` has the admitted trajectories by version, shard by shard; `tasks` are those of open groups. One that was
        issued for an earlier version is none of the round's.
        """
        loop = settings.loop
        num_open = sum(task.min_weight_version >= version for task in tasks)
        missing = loop.batch_size - sum(shard.get(version, 0) for shard in live)
        if version == self.version and missing <= 0 and not num_open:
            self.full_ms = now_ms if self.full_ms is None else self.full_ms
            return -(-self.lacks // loop.group_size)
        self.version, self.full_ms, self.lacks = version, None, 0
        return max(0, -(-missing // loop.group_size) - num_open)
