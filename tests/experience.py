"""Rows of `experience` and `ledger` for tests of the learner, put into a real lake."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import torch

from infra.lake import Lake
from schemas.names import Event
from schemas.settings import Objective
from schemas.tables import EXPERIENCE, LEDGER
from trainers.batches import MicroBatch, Tokens
from trainers.objectives import ActionTokens, Terms, evaluate
from trainers.objectives.aggregate import AGGREGATIONS

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLAIN = Objective(kl=0)


@dataclass(frozen=True, slots=True)
class Sample:
    """An admitted trajectory, as far as the learner looks at it."""

    name: str
    version: int = 1
    reward: float | None = 1.0
    mean: float | None = 0.5
    std: float | None = 0.5
    group: str = "g"
    priority: float = 0.0
    token_ids: Sequence[int] = (1, 2, 3)
    action_mask: Sequence[bool] = (False, True, True)
    behavior_logprobs: Sequence[float] = (0.0, -1.0, -1.0)
    bucket: int | None = None
    status: str = "completed"
    turns: Sequence[tuple[int, int, float]] = ()
    """First token, end and process reward of each."""
    origin: str = "rollout"
    forked_turns: Sequence[int] | None = None


def experience(samples: Iterable[Sample]) -> pa.Table:
    """Rows of table `experience`."""
    return pa.Table.from_pylist([_row(s) for s in samples], EXPERIENCE.schema)


def put(lake: Lake, samples: Iterable[Sample], sequence: int) -> None:
    """Commit `samples` as a curate flow would."""
    lake.append("experience", experience(samples), "curate/test", sequence)


def leave(lake: Lake, names: Iterable[str], event: Event, sequence: int, version: int = 1) -> None:
    """Commit ledger rows that say how trajectories left the buffer."""
    rows = [_ledger(name, event, version) for name in names]
    lake.append("ledger", pa.Table.from_pylist(rows, LEDGER.schema), "curate/test", sequence)


def group(prefix: str, size: int, version: int = 1) -> list[Sample]:
    """A group with one success among failures."""
    rewards = [1.0] + [0.0] * (size - 1)
    mean, std = float(np.mean(rewards)), float(np.std(rewards, ddof=1))
    return [Sample(f"{prefix}-{i}", version, r, mean, std, prefix) for i, r in enumerate(rewards)]


def table(rows: Sequence[tuple[Sequence[int], Sequence[bool], Sequence[float]]]) -> Tokens:
    """Rows of (token ids, action mask, behavior logprobs)."""
    ids, masks, behavior = zip(*rows, strict=True)
    columns = {
        "token_ids": pa.array(ids, pa.list_(pa.int32())),
        "action_mask": pa.array(masks, pa.list_(pa.bool_())),
        "behavior_logprobs": pa.array(behavior, pa.list_(pa.float32())),
    }
    return Tokens.of(pa.table(columns))


def spread(values: np.ndarray, tokens: Tokens) -> np.ndarray:
    """Each row's value [n] at all of its tokens, [T]."""
    return np.repeat(values.astype(np.float32), tokens.lengths)


def terms_of(batch: MicroBatch, logprobs: torch.Tensor, options: Objective = PLAIN, **more: object) -> Terms:
    """What `options` make of a micro-batch to which the learner gives `logprobs`; each token counts alike."""
    tokens = action_tokens(batch, logprobs, **more)
    return evaluate(tokens, AGGREGATIONS["token"](tokens, 1, 1, 1), options, options.kl)


def action_tokens(batch: MicroBatch, logprobs: torch.Tensor, **more: object) -> ActionTokens:
    """The action tokens of a micro-batch, as an objective gets them."""
    owners, rows = batch.owners, len(batch.rows)
    return ActionTokens(logprobs, batch.behavior_logprobs, batch.advantages, owners, rows, **more)  # pyright: ignore[reportArgumentType]


def _row(sample: Sample) -> dict[str, object]:
    return {
        **{f.name: _blank(f) for f in EXPERIENCE.schema},
        "trajectory_id": sample.name,
        "group_id": sample.group,
        "group_size": 8,
        "min_weight_version": sample.version,
        "max_weight_version": sample.version,
        "version_bucket": sample.version if sample.bucket is None else sample.bucket,
        "status": sample.status,
        "origin": sample.origin,
        "forked_turns": sample.forked_turns,
        "reward": sample.reward,
        "group_reward_mean": sample.mean,
        "group_reward_std": sample.std,
        "group_num_rewards": 8,
        "priority": sample.priority,
        "token_ids": sample.token_ids,
        "action_mask": sample.action_mask,
        "behavior_logprobs": sample.behavior_logprobs,
        "turns": [{"action_start": a, "action_end": b, "observation_end": b, "reward": r} for a, b, r in sample.turns],
        "num_generated_tokens": sum(sample.action_mask),
    }


def _ledger(name: str, event: Event, version: int) -> dict[str, object]:
    blank = {f.name: _blank(f) for f in LEDGER.schema}
    return blank | {"trajectory_id": name, "event": event, "min_weight_version": version, "day": "2026-01-01"}


def _blank(field: pa.Field) -> object:
    if field.nullable:
        return None
    if pa.types.is_timestamp(field.type):
        return NOW
    if pa.types.is_list(field.type):
        return []
    return "" if pa.types.is_string(field.type) else False if pa.types.is_boolean(field.type) else 0
