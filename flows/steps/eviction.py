"""Priority of admitted trajectories, and which ones go when a shard is full."""

import heapq
from collections.abc import Callable
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


_REASON = "the shard is full"
_REASON_WITHOUT_GUARD = "the shard is full, and every bucket has lost max_evicted_share"


class Entry(NamedTuple):
    """A live trajectory. Entries sort by `key`, then arrival: the least goes first."""

    key: float
    arrival: int
    member: Member


Policy = Callable[[float, int, Member], float]
"""(priority, arrival, member) -> key; the least key is evicted first, the earlier arrival among equals."""


def reward_priority(priority: float, arrival: int, member: Member) -> float:
    """The least priority goes first."""
    return priority


def fifo(priority: float, arrival: int, member: Member) -> float:
    """The one that came first goes first."""
    return float(arrival)


def stalest_first(priority: float, arrival: int, member: Member) -> float:
    """The one with the oldest weights goes first."""
    return float(member.min_weight_version)


POLICIES: dict[str, Policy] = {
    "reward_priority": reward_priority,
    "fifo": fifo,
    "stalest_first": stalest_first,
}


@dataclass(slots=True)
class Live:
    """Live trajectories of a shard: a heap for each version bucket, and how many each bucket admitted and lost."""

    heaps: dict[int, list[Entry]] = field(default_factory=dict)
    admitted: dict[int, int] = field(default_factory=dict)
    evicted: dict[int, int] = field(default_factory=dict)
    arrivals: int = 0
    size: int = 0

    def add(self, member: Member, bucket: int, priority: float, policy: Policy) -> None:
        """Let `member` live."""
        entry = Entry(policy(priority, self.arrivals, member), self.arrivals, member)
        heapq.heappush(self.heaps.setdefault(bucket, []), entry)
        self.admitted[bucket] = self.admitted.get(bucket, 0) + 1
        self.arrivals += 1
        self.size += 1

    def expire(self, oldest_version: int) -> list[Member]:
        """Remove and return, in order of arrival, what was sampled by weights older than `oldest_version`."""
        gone: list[Entry] = []
        for bucket, heap in list(self.heaps.items()):
            old = [e for e in heap if e.member.min_weight_version < oldest_version]
            if old:
                gone += old
                self._keep(bucket, [e for e in heap if e.member.min_weight_version >= oldest_version])
        self.size -= len(gone)
        return [e.member for e in sorted(gone, key=lambda e: e.arrival)]

    def evict(self, capacity: int, max_evicted_share: float) -> list[tuple[Member, str]]:
        """Remove what is above `capacity`, least key first; with the reason of each.

        A bucket that has lost `max_evicted_share` of what it admitted is spared, and the next one pays. When all
        buckets have, capacity wins: the least key of all goes, and the reason says so.
        """
        gone: list[tuple[Member, str]] = []
        if self.size <= capacity:
            return gone
        left = {b: int(max_evicted_share * self.admitted[b]) - self.evicted.get(b, 0) for b in self.heaps}
        while self.size > capacity:
            spare = [b for b in self.heaps if left[b] > 0]
            bucket = self._least(spare or list(self.heaps))
            gone.append((self._pop(bucket), _REASON if spare else _REASON_WITHOUT_GUARD))
            left[bucket] -= 1
        return gone

    def by_bucket(self) -> dict[int, int]:
        """Live trajectories by version bucket."""
        return {bucket: len(self.heaps[bucket]) for bucket in sorted(self.heaps)}

    def forget(self, oldest_bucket: int) -> None:
        """Drop the counts of buckets that nothing can be admitted to any more."""
        for counts in (self.admitted, self.evicted):
            for bucket in [b for b in counts if b < oldest_bucket and b not in self.heaps]:
                del counts[bucket]

    def _least(self, buckets: list[int]) -> int:
        return buckets[0] if len(buckets) == 1 else min(buckets, key=lambda b: self.heaps[b][0][:2])

    def _pop(self, bucket: int) -> Member:
        heap = self.heaps[bucket]
        member = heapq.heappop(heap).member
        if not heap:
            del self.heaps[bucket]
        self.evicted[bucket] = self.evicted.get(bucket, 0) + 1
        self.size -= 1
        return member

    def _keep(self, bucket: int, heap: list[Entry]) -> None:
        if heap:
            heapq.heapify(heap)
            self.heaps[bucket] = heap
        else:
            del self.heaps[bucket]
