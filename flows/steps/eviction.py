"""Priority of admitted trajectories, and which ones go when a shard is full."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from flows.steps.member import Member
from schemas.names import NUM_SHARDS, Status
from schemas.settings import Curate


def capacity_of_a_shard(capacity: int) -> int:
    """Live trajectories that one shard may hold."""
    return max(1, capacity // NUM_SHARDS)


@lru_cache(4096)
def freshness(staleness: int, max_staleness: int, bucket_width: int, bucket_weights: tuple[float, ...]) -> float:
    """1 for a trajectory of the newest weights, falling linearly to 0 above `max_staleness`; times its bucket's weight.

    `bucket_weights[k]` belongs to k buckets back; the last one holds for all older buckets, none at all means 1.
    """
    fresh = max(0.0, 1 - staleness / (max_staleness + 1))
    age = max(staleness, 0) // bucket_width
    return fresh * (bucket_weights[min(age, len(bucket_weights) - 1)] if bucket_weights else 1.0)


def priority(member: Member, task_mean: float, hard: bool, fresh: float, settings: Curate) -> float:
    """Learning signal, hard bonus, freshness, completion; fixed at admission, higher stays longer.

    |reward - task mean| + hard_bonus * hard + freshness_weight * freshness + completion_bonus * completed
    """
    return (
        abs((member.reward or 0.0) - task_mean)
        + settings.hard_bonus * hard
        + settings.freshness_weight * fresh
        + settings.completion_bonus * (member.status == Status.COMPLETED)
    )


LATE = "its group was evicted before it came"
FULL = "the shard is full"
FULL_WITHOUT_GUARD = "the shard is full, and every bucket has lost max_evicted_share"


class Entry(NamedTuple):
    """The live members of a group. Entries sort by `key`, then arrival of the group: the least goes first."""

    key: float
    arrival: int
    members: list[Member]


Policy = Callable[[float, int, Sequence[Member]], float]
"""(mean priority, arrival, members) -> key; the group of the least key is evicted first, the earlier among equals."""


def reward_priority(priority: float, arrival: int, members: Sequence[Member]) -> float:
    """The least mean priority goes first."""
    return priority


def fifo(priority: float, arrival: int, members: Sequence[Member]) -> float:
    """The group that came first goes first."""
    return float(arrival)


def stalest_first(priority: float, arrival: int, members: Sequence[Member]) -> float:
    """The group with the oldest weights goes first."""
    return float(min(member.min_weight_version for member in members))


POLICIES: dict[str, Policy] = {
    "reward_priority": reward_priority,
    "fifo": fifo,
    "stalest_first": stalest_first,
}


@dataclass(slots=True)
class Live:
    """Live trajectories of a shard, by group: a heap for each version bucket, and how many each admitted and lost.

    `groups` has the bucket of a group, which is that of its newest member when it was admitted, and its members.
    Siblings leave together: evicting rows by their own priority would keep the rare outcome of a group and drop its
    counterweight. Only age parts them.
    """

    heaps: dict[int, list[Entry]] = field(default_factory=dict)
    groups: dict[str, tuple[int, list[Member]]] = field(default_factory=dict)
    admitted: dict[int, int] = field(default_factory=dict)
    evicted: dict[int, int] = field(default_factory=dict)
    arrivals: int = 0
    size: int = 0

    def add(self, members: Sequence[Member], bucket: int, priority: float, policy: Policy) -> None:
        """Let `members` of one group live, whose newest is of `bucket` and whose mean is `priority`.

        Late members join their group, if it still lives.
        """
        name = members[0].group_id
        if name not in self.groups:
            self.groups[name] = bucket, []
            entry = Entry(policy(priority, self.arrivals, members), self.arrivals, self.groups[name][1])
            heapq.heappush(self.heaps.setdefault(bucket, []), entry)
            self.arrivals += 1
        bucket, siblings = self.groups[name]
        siblings.extend(members)
        self.admitted[bucket] = self.admitted.get(bucket, 0) + len(members)
        self.size += len(members)

    def expire(self, oldest_version: int) -> list[Member]:
        """Remove and return, by arrival of their groups, what was sampled by weights older than `oldest_version`."""
        gone: list[Member] = []
        for name, (_, members) in list(self.groups.items()):
            gone += [m for m in members if m.min_weight_version < oldest_version]
            members[:] = [m for m in members if m.min_weight_version >= oldest_version]
            if not members:
                del self.groups[name]
        if gone:
            self.size -= len(gone)
            self._drop_empty()
        return gone

    def evict(self, capacity: int, max_evicted_share: float) -> list[tuple[Member, str]]:
        """Remove whole groups while there are more than `capacity` members, least key first; with the reason of each.

        A bucket that would lose more than `max_evicted_share` of what it admitted is spared, and the next one pays.
        When all buckets would, capacity wins: the least key of all goes, and the reason says so. A group that is alone
        stays whatever its size, or a shard smaller than a group would hold nothing, ever.
        """
        gone: list[tuple[Member, str]] = []
        while self.size > capacity and len(self.groups) > 1:
            spare = [b for b in self.heaps if len(self.heaps[b][0].members) <= self._left(b, max_evicted_share)]
            members = self._pop(self._least(spare or list(self.heaps)))
            gone += [(member, FULL if spare else FULL_WITHOUT_GUARD) for member in members]
        return gone

    def by_bucket(self) -> dict[int, int]:
        """Live trajectories by version bucket."""
        return {bucket: sum(len(e.members) for e in self.heaps[bucket]) for bucket in sorted(self.heaps)}

    def forget(self, oldest_bucket: int) -> None:
        """Drop the counts of buckets that nothing can be admitted to any more."""
        for counts in (self.admitted, self.evicted):
            for bucket in [b for b in counts if b < oldest_bucket and b not in self.heaps]:
                del counts[bucket]

    def _left(self, bucket: int, max_evicted_share: float) -> int:
        """What `bucket` may still lose."""
        return int(max_evicted_share * self.admitted[bucket]) - self.evicted.get(bucket, 0)

    def _least(self, buckets: list[int]) -> int:
        return min(buckets, key=lambda b: self.heaps[b][0][:2])

    def _pop(self, bucket: int) -> list[Member]:
        heap = self.heaps[bucket]
        members = heapq.heappop(heap).members
        if not heap:
            del self.heaps[bucket]
        del self.groups[members[0].group_id]
        self.evicted[bucket] = self.evicted.get(bucket, 0) + len(members)
        self.size -= len(members)
        return members

    def _drop_empty(self) -> None:
        heaps = {bucket: [e for e in heap if e.members] for bucket, heap in self.heaps.items()}
        self.heaps = {bucket: heap for bucket, heap in heaps.items() if heap}
        for heap in self.heaps.values():
            heapq.heapify(heap)
