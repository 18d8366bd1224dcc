"""Rules that a trajectory must keep; the first one that it breaks becomes the reason of its `invalid` outcome.

Rules of identity come first: a row that breaks one cannot be said to belong to its group, so it touches nothing. A row
that breaks a later one takes its place in the group, so that the group need not wait for it, but has no vote.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flows.steps import payload, tasks
from flows.steps.chunk import Chunk
from flows.steps.columns import Columns, Mask, is_one_of, matches
from flows.steps.tasks import TaskColumns
from schemas.names import INFRASTRUCTURE_ERRORS, ErrorKind, Origin, Status, StopReason
from schemas.settings import Family

UUID = r"[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}"
NAME = r"[\w./:@+\- ]"
MAX_GROUP_SIZE = 1024
EARLIEST_US, LATEST_US = 946_684_800_000_000, 7_258_118_400_000_000  # years 2000 and 2200


class Rule(NamedTuple):
    """`broken` gives, per row, whether the rule is broken."""

    reason: str
    broken: Callable[[TaskColumns], Mask]


def _not_uuid(name: str) -> Callable[[Columns], Mask]:
    return lambda c: ~matches(c[name], UUID)


def _bad_place(c: Columns) -> Mask:
    index, size = c.numbers("group_index"), c.numbers("group_size")
    return (size < 1) | (size > MAX_GROUP_SIZE) | (index < 0) | (index >= size)


def _bad_names(c: Columns) -> Mask:
    return ~(matches(c["environment"], f"{NAME}+") & matches(c["producer"], f"{NAME}*"))


def _bad_lineage(c: Columns) -> Mask:
    return ~(matches(c["parent_id"], UUID) & matches(c["content_hash"], "[0-9a-zA-Z]*", 128))


def _bad_status(c: Columns) -> Mask:
    known = is_one_of(c["status"], list(Status)) & is_one_of(c["stop_reason"], list(StopReason))
    return ~(known & is_one_of(c["error_kind"], list(ErrorKind)))


def _infrastructure(c: Columns) -> Mask:
    named = is_one_of(c["error_kind"], list(INFRASTRUCTURE_ERRORS)) & ~_null(c, "error_kind")
    return named & is_one_of(c["status"], [Status.FAILED])


def _null(c: Columns, name: str) -> Mask:
    return c[name].is_null().to_numpy(zero_copy_only=False)


def _reward_missing(c: Columns) -> Mask:
    return _null(c, "reward") & ~_infrastructure(c)


def _reward_of_infrastructure(c: Columns) -> Mask:
    return ~_null(c, "reward") & _infrastructure(c)


def _reward_not_finite(c: Columns) -> Mask:
    return ~np.isfinite(c.numbers("reward")) & ~_null(c, "reward")


def _bad_times(c: Columns) -> Mask:
    bad = np.zeros(len(c), np.bool_)
    for name in ("started_at", "finished_at"):
        us = c[name].cast("int64").to_numpy()
        bad |= (us < EARLIEST_US) | (us > LATEST_US)
    return bad


def _bad_costs(c: Columns) -> Mask:
    bad = c.numbers("attempt") < 1
    for name in ("accelerator_s", "environment_s"):
        seconds = c.numbers(name)
        bad |= ~(np.isfinite(seconds) & (seconds >= 0))
    return bad


def _bad_versions(c: Columns) -> Mask:
    oldest, newest = c.numbers("min_weight_version"), c.numbers("max_weight_version")
    return (oldest < 0) | (newest < oldest) | (c.numbers("dispatch_weight_version") < 0)


IDENTITY = (
    Rule("trajectory_id is not a UUID", _not_uuid("trajectory_id")),
    Rule("group_id is not a UUID", _not_uuid("group_id")),
    Rule("group_index lies outside [0, group_size), or group_size outside [1, 1024]", _bad_place),
    Rule("origin is not a known word", lambda c: ~is_one_of(c["origin"], list(Origin))),
    Rule("task_id is not `<task_family>/<index>`", tasks.malformed),
    Rule("task does not belong to this shard; check the message's partition and shard header", tasks.misrouted),
    Rule("task is not in the settings: unknown family, or index out of range", tasks.unknown),
    Rule("a held-out task, which is never trained on", tasks.held_out),
)

PAYLOAD = (
    Rule("environment or producer holds other characters than a name may", _bad_names),
    Rule("parent_id is not a UUID, or content_hash not alphanumeric", _bad_lineage),
    Rule("status, stop_reason or error_kind is not a known word", _bad_status),
    Rule("reward is missing, though no infrastructure failed", _reward_missing),
    Rule("reward is set, though the infrastructure failed", _reward_of_infrastructure),
    Rule("reward is NaN or infinite", _reward_not_finite),
    Rule("started_at or finished_at lies outside the years 2000 to 2200", _bad_times),
    Rule("accelerator_s or environment_s is negative or not finite, or attempt below 1", _bad_costs),
    Rule("weight versions are negative, or min_weight_version above max_weight_version", _bad_versions),
    Rule("a list holds nulls", payload.nulls),
    Rule("no tokens", payload.no_tokens),
    Rule("token_ids, action_mask and behavior_logprobs differ in length", payload.lengths),
)

TOKENS = (
    Rule("no action tokens, though the episode did not fail", payload.no_actions),
    Rule("a token id is negative", payload.negative_tokens),
    Rule("a behavior logprob is NaN or infinite", payload.logprob_not_finite),
    Rule("a behavior logprob on the action mask is positive", payload.logprob_positive),
    Rule("num_generated_tokens or num_prompt_tokens does not fit the action mask", payload.counts),
    Rule("weight_version_spans are out of order or out of range", payload.spans_out_of_place),
    Rule("weight_version_spans leave action tokens uncovered", payload.spans_incomplete),
    Rule("min or max_weight_version differs from the spans of the action tokens", payload.spans_differ),
    Rule("turns are out of range, or their result_status is not a known word", payload.turns),
    Rule("a process reward is NaN or infinite", payload.process_rewards),
)

RULES = (*IDENTITY, *PAYLOAD, *TOKENS)


def validate(chunk: Chunk, families: Sequence[Family]) -> Chunk:
    """`chunk` with the first broken rule of each row in `faults`."""
    if not chunk.rows.num_rows:
        return chunk
    return dataclasses.replace(chunk, faults=faults(TaskColumns(chunk.rows, chunk.shard, families)))


def faults(columns: TaskColumns) -> npt.NDArray[np.uint8]:
    """Per row 0, or 1 + the index of the first rule in RULES that it breaks."""
    found = np.zeros(len(columns), np.uint8)
    _apply((*IDENTITY, *PAYLOAD), columns, found, 1)
    sound = found == 0  # token rules rely on lists of one length
    if sound.all():
        _apply(TOKENS, columns, found, 1 + len(IDENTITY) + len(PAYLOAD))
    elif sound.any():
        rest = np.zeros(int(sound.sum()), np.uint8)
        _apply(TOKENS, columns.where(sound), rest, 1 + len(IDENTITY) + len(PAYLOAD))
        found[sound] = rest
    return found


def takes_a_place(fault: int) -> bool:
    """Whether a row with this fault still takes its place in its group."""
    return fault > len(IDENTITY)


def _apply(rules: Sequence[Rule], columns: TaskColumns, found: npt.NDArray[np.uint8], first: int) -> None:
    for code, rule in enumerate(rules, first):
        broken = rule.broken(columns)
        if broken.any():
            found[broken & (found == 0)] = code
