"""A trajectory: one agent, one episode, as objects and as Arrow rows (one row = one episode)."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import pyarrow as pa

from schemas.names import SCHEMA_VERSION, Origin, ResultStatus, Status, StopReason

T = TypeVar("T")

TIMESTAMP = pa.timestamp("us", tz="UTC")

SPAN_TYPE = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.int64())])
REWARD_TYPE = pa.struct([("name", pa.string()), ("value", pa.float32())])
TURN_TYPE = pa.struct(
    [
        ("action_start", pa.int32()),
        ("action_end", pa.int32()),
        ("observation_end", pa.int32()),
        ("tool", pa.string()),
        ("arguments", pa.string()),
        ("result_status", pa.string()),
        ("reward", pa.float32()),
        ("latency_s", pa.float32()),
    ]
)


def column(name: str, type_: pa.DataType, doc: str, nullable: bool = False) -> pa.Field:
    """An Arrow field that carries its one-line documentation."""
    return pa.field(name, type_, nullable, {"doc": doc})


TRAJECTORY_SCHEMA = pa.schema(
    [
        column("trajectory_id", pa.string(), "UUIDv7 of this episode"),
        column("group_id", pa.string(), "ties the siblings of one prompt; UUIDv5 of (run, task, draw)"),
        column("group_index", pa.int32(), "place in the group, in [0, group_size)"),
        column("group_size", pa.int32(), "members that the group was dispatched with"),
        column("task_id", pa.string(), "family/index"),
        column("task_family", pa.string(), "family of the task"),
        column("environment", pa.string(), "registry name of the environment"),
        column("attempt", pa.int32(), "1 for the first issue of the task, +1 per re-issue"),
        column("parent_id", pa.string(), "trajectory that this one branched from", True),
        column("origin", pa.string(), "rollout, eval, counterfactual or import"),
        column("producer", pa.string(), "service instance that rolled it out"),
        column("content_hash", pa.string(), "SHA-256 of task, tokens and version spans"),
        column("dispatch_weight_version", pa.int64(), "version that served when the episode began"),
        column("min_weight_version", pa.int64(), "oldest version that sampled an action token"),
        column("max_weight_version", pa.int64(), "newest version that sampled an action token"),
        column("weight_version_spans", pa.list_(SPAN_TYPE), "token spans [start, end) and the version that served"),
        column("status", pa.string(), "completed, truncated or failed"),
        column("stop_reason", pa.string(), "what ended the episode"),
        column("error_kind", pa.string(), "whose failure it was", True),
        column("error", pa.string(), "the failure in words", True),
        column("reward", pa.float32(), "outcome reward; null where the infrastructure failed", True),
        column("rewards", pa.list_(REWARD_TYPE), "named parts of the reward, process rewards among them"),
        column("token_ids", pa.list_(pa.int32()), "prompt, actions and observations, as sampled"),
        column("action_mask", pa.list_(pa.bool_()), "true where the policy chose the token"),
        column("behavior_logprobs", pa.list_(pa.float32()), "of the policy that sampled; 0 off the mask"),
        column("turns", pa.list_(TURN_TYPE), "decisions and the observations that followed; indices count tokens"),
        column("messages", pa.string(), "the conversation as OpenAI chat JSON"),
        column("num_prompt_tokens", pa.int32(), "tokens before the first action"),
        column("num_generated_tokens", pa.int32(), "action tokens"),
        column("accelerator_s", pa.float32(), "share of accelerator time, in seconds"),
        column("environment_s", pa.float32(), "time in tools and environment, in seconds"),
        column("started_at", TIMESTAMP, "start of the episode (UTC)"),
        column("finished_at", TIMESTAMP, "end of the episode (UTC)"),
    ],
    {"lagoon.schema_version": str(SCHEMA_VERSION)},
)


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Tokens [start, end) were sampled, or read, under `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One decision of the agent and the observation that followed it.

    The action is tokens [action_start, action_end), its observation [action_end, observation_end). `arguments` is
    the call's JSON text as the agent wrote it (bounded); `reward` is the turn's process reward.
    """

    action_start: int
    action_end: int
    observation_end: int
    tool: str | None = None
    arguments: str | None = None
    result_status: str = ResultStatus.NONE
    reward: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reward:
    """A named part of the reward, for example `("format", 0.5)`."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode, field for field a row of TRAJECTORY_SCHEMA (which documents each)."""

    trajectory_id: str
    group_id: str
    group_index: int
    group_size: int
    task_id: str
    task_family: str
    environment: str
    attempt: int = 1
    parent_id: str | None = None
    origin: str = Origin.ROLLOUT
    producer: str = ""
    content_hash: str = ""
    dispatch_weight_version: int
    min_weight_version: int
    max_weight_version: int
    weight_version_spans: tuple[WeightVersionSpan, ...] = ()
    status: str = Status.COMPLETED
    stop_reason: str = StopReason.ANSWER
    error_kind: str | None = None
    error: str | None = None
    reward: float | None = None
    rewards: tuple[Reward, ...] = ()
    token_ids: tuple[int, ...] = ()
    action_mask: tuple[bool, ...] = ()
    behavior_logprobs: tuple[float, ...] = ()
    turns: tuple[Turn, ...] = ()
    messages: tuple[dict[str, Any], ...] = field(default=())
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    accelerator_s: float = 0.0
    environment_s: float = 0.0
    started_at: datetime
    finished_at: datetime


_PARTS = {
    name: tuple(part.name for part in dataclasses.fields(type_))
    for name, type_ in (("weight_version_spans", WeightVersionSpan), ("turns", Turn), ("rewards", Reward))
}

_NAMES, _ROW = tuple(TRAJECTORY_SCHEMA.names), pa.struct(list(TRAJECTORY_SCHEMA))


def to_batch(trajectories: Sequence[Trajectory]) -> pa.RecordBatch:
    """The rows of `trajectories`, in order, under TRAJECTORY_SCHEMA. Types are declared, never inferred.

    Text may come from models, tools, programs and servers: what UTF-8 cannot hold of it is replaced (`encodable`).
    """
    rows = [{name: _cell(t, name) for name in _NAMES} for t in trajectories]
    batch = pa.RecordBatch.from_struct_array(pa.array(rows, _ROW))  # one conversion: three times as fast as by column
    return batch.replace_schema_metadata(TRAJECTORY_SCHEMA.metadata)


def encodable(text: str) -> str:
    """`text` with a question mark for each lone surrogate, which JSON may escape and UTF-8 cannot hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def from_batch(batch: pa.RecordBatch | pa.Table) -> list[Trajectory]:
    """The trajectories of `batch`, which may carry further columns (they are left out)."""
    return [_from_row(row) for row in batch.select(TRAJECTORY_SCHEMA.names).to_pylist()]


def _cell(trajectory: Trajectory, name: str) -> Any:
    value = getattr(trajectory, name)
    if name == "messages":
        return encodable(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    if parts := _PARTS.get(name):
        return [{part: _plain(getattr(item, part)) for part in parts} for item in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    return encodable(value) if isinstance(value, str) else value


def _from_row(row: dict[str, Any]) -> Trajectory:
    row["messages"] = tuple(json.loads(row["messages"]))
    row["weight_version_spans"] = _objects(WeightVersionSpan, row["weight_version_spans"])
    row["turns"] = _objects(Turn, row["turns"])
    row["rewards"] = _objects(Reward, row["rewards"])
    for name in ("token_ids", "action_mask", "behavior_logprobs"):
        row[name] = tuple(row[name])
    return Trajectory(**row)


def _objects(type_: type[T], rows: Iterable[dict[str, Any]]) -> tuple[T, ...]:
    return tuple(type_(**row) for row in rows)
