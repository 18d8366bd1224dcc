"""Rules about what a trajectory carries: tokens, logprobs, version spans, turns. Rows in, a mask of offenders out."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flows.steps.columns import Columns, Lists, Mask, is_one_of, numbers
from schemas.names import ResultStatus, Status

POSITIVE_LOGPROB = 1e-4
"""A logprob above 0 by no more than this is rounding of the engine's softmax."""

LISTS = ("token_ids", "action_mask", "behavior_logprobs", "weight_version_spans", "turns", "rewards")
NUMBER_FIELDS = {
    "weight_version_spans": ("start", "end", "version"),
    "turns": ("action_start", "action_end", "observation_end", "result_status", "reward", "latency_s"),
    "rewards": ("name", "value"),
}


def nulls(c: Columns) -> Mask:
    """Nulls inside a list, or in a field of its structs that must be set."""
    bad = np.zeros(len(c), np.bool_)
    for name in LISTS:
        lists = c.lists(name)
        fields = [lists.child(f) for f in NUMBER_FIELDS.get(name, ())]
        for array in (lists.values, *fields):
            if array.null_count:
                bad |= lists.any_by_row(array.is_null().to_numpy(zero_copy_only=False))
    return bad


def no_tokens(c: Columns) -> Mask:
    """Episodes without any token, not even a prompt."""
    return c.lists("token_ids").lengths == 0


def lengths(c: Columns) -> Mask:
    """The three token columns must be of one length."""
    length = c.lists("token_ids").lengths
    return (length != c.lists("action_mask").lengths) | (length != c.lists("behavior_logprobs").lengths)


def no_actions(c: Columns) -> Mask:
    """Only a failed episode may have ended before its first action."""
    return (c.num_actions == 0) & ~is_one_of(c["status"], [Status.FAILED])


def negative_tokens(c: Columns) -> Mask:
    """Token ids count from 0."""
    tokens = c.lists("token_ids")
    return tokens.any_by_row(numbers(tokens.values) < 0)


def logprob_not_finite(c: Columns) -> Mask:
    """NaN and infinity, on the mask or off it: NaN times 0 is NaN."""
    logprobs = c.lists("behavior_logprobs")
    return logprobs.any_by_row(~np.isfinite(numbers(logprobs.values)))


def logprob_positive(c: Columns) -> Mask:
    """A probability is at most 1."""
    logprobs = c.lists("behavior_logprobs")
    positive = numbers(logprobs.values) > POSITIVE_LOGPROB
    return logprobs.any_by_row(positive & c.actions) if positive.any() else np.zeros(len(c), np.bool_)


def counts(c: Columns) -> Mask:
    """Counted tokens must be there, or every sum over them lies."""
    prompt, length = c.numbers("num_prompt_tokens"), c.lists("token_ids").lengths
    return (c.numbers("num_generated_tokens") != c.num_actions) | (prompt < 0) | (prompt > length)


def spans_out_of_place(c: Columns) -> Mask:
    """Spans are not empty, within the tokens, and follow one another without overlap."""
    spans, start, end = _spans(c)
    first = np.zeros(len(start), np.bool_)
    first[spans.offsets[:-1][spans.lengths > 0]] = True
    overlaps = np.concatenate([[False], start[1:] < end[:-1]]) & ~first if len(start) else first
    beyond = end > spans.per_value(c.lists("token_ids").lengths)
    return spans.any_by_row((start < 0) | (end <= start) | beyond | overlaps)


def spans_incomplete(c: Columns) -> Mask:
    """Every action token lies in a span: its version is known."""
    spans = c.lists("weight_version_spans")
    covered = np.add.reduceat(np.append(c.num_actions_by_span, 0), spans.offsets[:-1]) * (spans.lengths > 0)
    return covered != c.num_actions


def spans_differ(c: Columns) -> Mask:
    """The two versions of a row are the least and the greatest of its spans with action tokens."""
    spans, num_actions = c.lists("weight_version_spans"), c.num_actions_by_span
    version = numbers(spans.child("version")).astype(np.int64)
    limits = np.iinfo(np.int64)
    oldest = np.append(np.where(num_actions > 0, version, limits.max), limits.max)
    newest = np.append(np.where(num_actions > 0, version, limits.min), limits.min)
    starts, told = spans.offsets[:-1], (c.num_actions > 0) & (spans.lengths > 0)
    differs = np.minimum.reduceat(oldest, starts) != c.numbers("min_weight_version")
    return told & (differs | (np.maximum.reduceat(newest, starts) != c.numbers("max_weight_version")))


def turns(c: Columns) -> Mask:
    """0 <= action_start <= action_end <= observation_end <= tokens."""
    lists = c.lists("turns")
    start, middle, end = (numbers(lists.child(f)) for f in ("action_start", "action_end", "observation_end"))
    beyond = end > lists.per_value(c.lists("token_ids").lengths)
    strange = ~is_one_of(lists.child("result_status"), list(ResultStatus))
    return lists.any_by_row((start < 0) | (middle < start) | (end < middle) | beyond | strange)


def process_rewards(c: Columns) -> Mask:
    """Rewards of turns and named parts of the outcome are finite."""
    turn, part = c.lists("turns"), c.lists("rewards")
    bad = turn.any_by_row(_not_finite(turn.child("reward")) | _not_finite(turn.child("latency_s")))
    return bad | part.any_by_row(_not_finite(part.child("value")))


def _not_finite(array: pa.Array) -> Mask:
    return ~np.isfinite(numbers(array))


def _spans(c: Columns) -> tuple[Lists, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    spans = c.lists("weight_version_spans")
    start, end = (numbers(spans.child(f)).astype(np.int64) for f in ("start", "end"))
    return spans, start, end
