"""A member: what curation remembers of a trajectory while it may still need it. No tokens, ever."""

import math
import re
from typing import Any, NamedTuple

from flows.steps.chunk import Chunk, Pack
from flows.steps.columns import Lists

Coordinates = tuple[int, int]
"""Partition and offset of a message."""


class Member(NamedTuple):
    """Ids, scores and coordinates of one trajectory."""

    trajectory_id: str
    group_id: str
    task_id: str
    task_family: str
    min_weight_version: int
    max_weight_version: int
    num_generated_tokens: int
    reward: float | None
    status: str
    error_kind: str | None
    accelerator_s: float
    attempt: int
    producer: str
    origin: str
    group_index: int
    group_size: int
    content_hash: str
    num_tokens: int
    partition: int
    offset: int
    row: int
    at_ms: int

    @property
    def id_bytes(self) -> bytes:
        """The trajectory id, the same for every spelling of it."""
        return bytes.fromhex(self.trajectory_id.replace("-", ""))

    @property
    def place(self) -> Coordinates:
        """Partition and offset of its message."""
        return self.partition, self.offset


_FROM_ROWS = Member._fields[: Member._fields.index("num_tokens")]
_UNSAFE = re.compile(r"[^\w./:@+\- ]", re.ASCII)
_TEXTS = ("trajectory_id", "group_id", "task_id", "task_family", "status", "error_kind", "producer", "origin")


def members(chunk: Chunk) -> list[Member]:
    """The members of all packs of `chunk`, in order."""
    if not chunk.rows.num_rows:
        return []
    columns: list[Any] = [chunk.rows.column(name).to_pylist() for name in _FROM_ROWS]
    columns.append(Lists(chunk.rows.column("token_ids")).lengths.tolist())
    packs = [event for event in chunk.events if isinstance(event, Pack)]
    places = [(p.partition, p.offset, row, p.at_ms) for p in packs for row in range(p.stop - p.start)]
    columns += zip(*places, strict=True)
    return list(map(Member._make, zip(*columns, strict=True)))


def cleaned(member: Member) -> Member:
    """An invalid member with values that are safe to keep: plain short texts, finite numbers."""
    texts = {name: _clean(getattr(member, name)) for name in _TEXTS}
    reward = member.reward if member.reward is not None and math.isfinite(member.reward) else None
    cost = member.accelerator_s if math.isfinite(member.accelerator_s) and member.accelerator_s > 0 else 0.0
    generated = min(max(member.num_generated_tokens, 0), member.num_tokens)
    return member._replace(**texts, reward=reward, accelerator_s=cost, num_generated_tokens=generated)


def _clean(text: str | None) -> str | None:
    return None if text is None else _UNSAFE.sub("?", text[:256])
