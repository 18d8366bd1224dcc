"""Groups: the siblings of one prompt, from the first member to the close, and what is remembered after it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flows.steps.member import Member

MAX_CLOSED = 1024
"""Closed groups that a shard remembers at most, so that its state is bounded whatever happens."""


class Stats(NamedTuple):
    """Rewards of a group. `std` is the sample standard deviation (n-1), None below two rewards."""

    num_rewards: int
    mean: float | None
    std: float | None
    pass_rate: float | None
    zero_variance: bool

    @property
    def no_signal(self) -> str | None:
        """Why the group teaches nothing, or None."""
        if self.num_rewards < 2:
            return f"{self.num_rewards} rewards in the group: nothing to compare with"
        return f"all {self.num_rewards} rewards of the group are equal" if self.zero_variance else None


def stats(rewards: Sequence[float], success_reward: float) -> Stats:
    """Mean, standard deviation and pass rate of `rewards`, in float64 and two passes.

    Zero variance is `max == min`, exactly: a one-pass variance in float32 leaves 2e-7 for eight rewards of 0.95, and
    an advantage of -2075 for a loser among them.
    """
    n = len(rewards)
    if not n:
        return Stats(0, None, None, None, True)
    mean = math.fsum(rewards) / n
    pass_rate = sum(r >= success_reward for r in rewards) / n
    if min(rewards) == max(rewards):
        return Stats(n, rewards[0], 0.0 if n > 1 else None, pass_rate, True)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (n - 1))
    return Stats(n, mean, std, pass_rate, False)


@dataclass(slots=True)
class OpenGroup:
    """A group that waits for members. Stale members vote; failed infrastructure and invalid members do not.

    `pending` are the members whose outcome waits for the close; the others have theirs.
    """

    group_id: str
    task_id: str
    task_family: str
    group_size: int
    origin: str
    opened_ms: int
    places: int = 0
    num_members: int = 0
    newest_version: int = 0
    ids: list[bytes] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    contents: set[str] = field(default_factory=set)
    pending: list[Member] = field(default_factory=list)

    @classmethod
    def of(cls, member: Member, at_ms: int) -> "OpenGroup":
        """The group that `member` opens at `at_ms`."""
        m = member
        return cls(m.group_id, m.task_id, m.task_family, m.group_size, m.origin, at_ms)

    @property
    def complete(self) -> bool:
        """Whether every member has come."""
        return self.num_members == self.group_size

    def take(self, member: Member, id_bytes: bytes) -> None:
        """Give `member` its place."""
        self.places |= 1 << member.group_index
        self.num_members += 1
        self.newest_version = max(self.newest_version, member.max_weight_version)
        self.ids.append(id_bytes)

    def vote(self, member: Member) -> None:
        """Count the reward of `member` in the group's baseline, if it has one."""
        self.contents.add(member.content_hash)
        if member.reward is not None:
            self.rewards.append(member.reward)


class ClosedGroup(NamedTuple):
    """What is remembered of a closed group: enough to know its members again and to judge late ones."""

    task_id: str
    group_size: int
    origin: str
    places: int
    ids: bytes
    newest_version: int
    closed_ms: int
    stats: Stats
    is_evicted: bool = False

    def with_late(self, member: Member, id_bytes: bytes) -> "ClosedGroup":
        """The same group, with `member` known and its statistics unchanged."""
        return self._replace(
            places=self.places | 1 << member.group_index,
            ids=self.ids + id_bytes,
            newest_version=max(self.newest_version, member.max_weight_version),
        )


def close(group: OpenGroup, at_ms: int, success_reward: float) -> ClosedGroup:
    """`group` as it is remembered."""
    return ClosedGroup(
        group.task_id,
        group.group_size,
        group.origin,
        group.places,
        b"".join(group.ids),
        group.newest_version,
        at_ms,
        stats(group.rewards, success_reward),
    )


def same_group(member: Member, group: OpenGroup | ClosedGroup) -> bool:
    """Whether `member` tells the same about its group as the member that opened it."""
    told = (member.task_id, member.group_size, member.origin)
    return told == (group.task_id, group.group_size, group.origin)


def forgettable(group: ClosedGroup, learner_version: int, max_staleness: int, now_ms: int, keep_s: float) -> bool:
    """Whether no member of `group` can matter any more: too old to be admitted, and no lease left that could bring one.

    A member that comes after that opens a group anew, which ends by timeout; so both limits are generous.
    """
    too_old = learner_version - group.newest_version > max_staleness + 2
    return too_old and now_ms - group.closed_ms > keep_s * 1000
