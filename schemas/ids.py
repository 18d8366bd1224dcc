"""Names of things: trajectory ids, group ids, shards."""

import hashlib
import os
import time
import uuid
import zlib

from schemas.names import NUM_SHARDS

_NAMESPACE = uuid.UUID("6f5d3c0e-5a1b-5c7e-9d51-1a900a1a9003")


def trajectory_id() -> str:
    """A new UUIDv7 (RFC 9562, section 5.7): sorts by creation time, unique without coordination."""
    raw = bytearray((time.time_ns() // 1_000_000).to_bytes(6, "big") + os.urandom(10))
    raw[6] = 0x70 | (raw[6] & 0x0F)
    raw[8] = 0x80 | (raw[8] & 0x3F)
    return str(uuid.UUID(bytes=bytes(raw)))


def group_id(run: str, task_id: str, draw: int) -> str:
    """The name-based UUID of the `draw`-th time that `task_id` was drawn in `run`: a re-issue gets the same id."""
    return str(uuid.uuid5(_NAMESPACE, f"{run}/{task_id}/{draw}"))


def fork_id(parent_id: str, turn: int) -> str:
    """The group of the branches that leave trajectory `parent_id` at its turn `turn`, counted from 0."""
    return str(uuid.uuid5(_NAMESPACE, f"fork/{parent_id}/{turn}"))


def task_id(family: str, index: int) -> str:
    """`family/index`, for example `chain/17`."""
    return f"{family}/{index}"


def shard_of(task: str) -> int:
    """The curation shard of a task, in [0, NUM_SHARDS); all its groups and its posterior live there."""
    return zlib.crc32(task.encode()) % NUM_SHARDS


def shard_key(shard: int) -> str:
    """The Bytewax key of a shard, zero-padded because Bytewax routes by sorted order."""
    return f"s{shard:03d}"


def partition_of(task: str, num_partitions: int) -> int:
    """The Kafka partition of a task's groups.

    `num_partitions` divides NUM_SHARDS, so each shard reads from one partition and sees one order.
    """
    return shard_of(task) % num_partitions


def content_hash(task: str, token_ids: list[int], spans: list[tuple[int, int, int]]) -> str:
    """SHA-256 over task, tokens and version spans: equal only for the same answer of the same weights."""
    return hashlib.sha256(repr((task, token_ids, spans)).encode()).hexdigest()
