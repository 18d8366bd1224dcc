"""Trajectories and messages for tests, sound unless told otherwise."""

import dataclasses
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from flows.connectors.items import Raw
from schemas.ids import content_hash, partition_of, shard_of
from schemas.messages import Directive, Message, WeightSummary
from schemas.names import Header
from schemas.topics import CONTROL, TRAJECTORIES, WEIGHTS
from schemas.trajectory import Trajectory, WeightVersionSpan
from schemas.wire import pack

T0_MS = 1_790_000_000_000
"""Broker time of the first message of a test."""

NOON = datetime(2026, 9, 1, 12, tzinfo=UTC)


def uid(*name: object) -> str:
    """A UUID that is the same for the same name."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "/".join(map(str, name))))


def trajectory(group: object = "g", index: int = 0, size: int = 4, version: int = 1, **changes: Any) -> Trajectory:
    """A completed episode of 6 tokens, 3 of them actions, sampled by `version` alone."""
    tokens = changes.get("token_ids", (11, 12, 13, 21 + index, 22, 23))
    task = changes.get("task_id", "add/7")
    spans = (WeightVersionSpan(0, len(tokens), version),)
    base = Trajectory(
        trajectory_id=uid("trajectory", group, index),
        group_id=uid("group", group),
        group_index=index,
        group_size=size,
        task_id=task,
        task_family=task.partition("/")[0],
        environment="calculator",
        producer="rollout-0",
        content_hash=content_hash(task, list(tokens), [(s.start, s.end, s.version) for s in spans]),
        dispatch_weight_version=version,
        min_weight_version=version,
        max_weight_version=version,
        weight_version_spans=spans,
        reward=1.0,
        token_ids=tokens,
        action_mask=(False, False, False, True, True, True),
        behavior_logprobs=(0.0, 0.0, 0.0, -0.5, -0.25, -0.125),
        num_prompt_tokens=3,
        num_generated_tokens=3,
        accelerator_s=0.5,
        started_at=NOON,
        finished_at=NOON,
    )
    return dataclasses.replace(base, **changes)


def group(name: object, rewards: Sequence[float | None], **changes: Any) -> list[Trajectory]:
    """A whole group, one member a reward; None is a failure of the infrastructure."""
    failed = {"status": "failed", "stop_reason": "error", "error_kind": "environment", "error": "sandbox died"}
    return [
        trajectory(name, i, len(rewards), reward=reward, **({} if reward is not None else failed) | changes)
        for i, reward in enumerate(rewards)
    ]


def message(
    trajectories: Sequence[Trajectory],
    offset: int,
    at_s: float = 0,
    *,
    outbox: str = "",
    sequence: int = 0,
    partitions: int = 1,
) -> Raw:
    """A `trajectories` message at `at_s` seconds after T0_MS."""
    body, headers = pack(trajectories)
    if outbox:
        headers |= {Header.OUTBOX: outbox.encode(), Header.SEQUENCE: str(sequence).encode()}
    lane = partition_of(trajectories[0].task_id, partitions)
    return Raw(
        TRAJECTORIES.name,
        lane,
        offset,
        T0_MS + round(at_s * 1000),
        trajectories[0].group_id.encode(),
        tuple((str(name), value) for name, value in headers.items()),
        body,
        lane,
    )


def broken(offset: int, at_s: float = 0, task: str = "add/7", rows: int = 3, tokens: int = 18) -> Raw:
    """A `trajectories` message whose body nobody can read, but whose headers count it."""
    headers = {Header.SHARD: shard_of(task), Header.NUM_ROWS: rows, Header.NUM_TOKENS: tokens}
    cells = tuple((str(name), str(value).encode()) for name, value in headers.items())
    return Raw(TRAJECTORIES.name, 0, offset, T0_MS + round(at_s * 1000), b"key", cells, b"\xff\x00 this is not Arrow")


def weights(version: int, offset: int, at_s: float = 0) -> Raw:
    """The summary of a published version."""
    summary = WeightSummary(version=version, fingerprint="f" * 64, num_bytes=1, train_step=version, created_at=NOON)
    return _side(WEIGHTS.name, summary, offset, at_s)


def clock(offset: int, at_s: float) -> Raw:
    """A clock message."""
    return control(offset, at_s, target="clock")


def control(offset: int, at_s: float, directive_id: str = "d1", target: str = "curate", **orders: Any) -> Raw:
    """A directive, issued when the broker got it."""
    issued_at = datetime.fromtimestamp(T0_MS / 1000 + at_s, UTC)
    directive = Directive.model_validate(
        {"directive_id": directive_id, "target": target, "issued_by": "test", "issued_at": issued_at, **orders}
    )
    return _side(CONTROL.name, directive, offset, at_s)


def _side(topic: str, body: Message, offset: int, at_s: float) -> Raw:
    return Raw(topic, 0, offset, T0_MS + round(at_s * 1000), None, (), body.to_bytes())
