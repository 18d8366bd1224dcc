"""What the rows of a batch say besides their tokens: advantages, successes, preferences between siblings."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.settings import Settings
from trainers.batches import Floats, Ints, MicroBatch, Split, Tokens, num_action_tokens, rank_batches
from trainers.credit import BASELINES, Evidence, Turns


@dataclass(frozen=True, slots=True)
class Signals:
    """Of a batch of n rows with m turns in all.

    `turn_advantages` float64 [m], zeros where `evidence` is there, from which the engine makes them with its values;
    `kept` bool [n], rows that are learned from; `success_weights` float32 [n], whose mean over action tokens is 1 if
    any row succeeded; `chosen` and `rejected` int64 [p], pairs of siblings; `sample_weights` float64 [n], what corrects
    for how likely rows were drawn, with a mean of 1 (None: nothing).
    """

    turns: Turns
    turn_advantages: Floats
    kept: NDArray[np.bool_]
    success_weights: NDArray[np.float32]
    chosen: Ints
    rejected: Ints
    evidence: Evidence | None = None
    sample_weights: Floats | None = None

    @property
    def row_weights(self) -> Floats:
        """What each row counts in the objective, [n]."""
        weights = np.ones(len(self.kept)) if self.sample_weights is None else self.sample_weights
        return np.where(self.kept, weights, 0.0)


def signals(
    rows: pa.Table,
    tokens: Tokens,
    turns: Turns,
    settings: Settings,
    process_factor: float = 0.0,
    probabilities: Sequence[float] = (),
) -> Signals:
    """The signals of `rows`, whose tokens and turns are `tokens` and `turns`.

    `process_factor` is what process rewards are multiplied by: their weight now, and their scale. `probabilities` are
    those with which the rows were drawn.
    """
    evidence = Evidence.of(rows, turns, process_factor)
    kept = np.isfinite(evidence.outcomes)
    if settings.objective.mask_truncated:
        kept &= ~evidence.truncated
    chosen, rejected = pairs(rows.column("group_id").to_pylist(), evidence.outcomes)
    baseline = BASELINES.get(settings.credit.baseline)
    return Signals(
        turns=turns,
        turn_advantages=baseline(evidence, settings.credit) if baseline else np.zeros(len(evidence.process)),
        kept=kept,
        success_weights=_success_weights(evidence.outcomes >= settings.loop.success_reward, num_action_tokens(tokens)),
        chosen=chosen,
        rejected=rejected,
        evidence=None if baseline else evidence,
        sample_weights=sample_weights(probabilities, settings.learner.sampling_correction) if probabilities else None,
    )


def sample_weights(probabilities: Sequence[float], exponent: float) -> Floats:
    """(1 / probability)^exponent [n], divided by its mean over the batch, so that the step's size stays.

    Source: prioritized experience replay, Schaul et al. 2016 (arXiv 1511.05952), section 3.4, which divides by the
    largest weight instead.
    """
    weights = np.asarray(probabilities, np.float64) ** -exponent
    return np.asarray(weights / weights.mean(), np.float64)


def share_of(tokens: Tokens, signals: Signals, split: Split, rank: int, size: int) -> Iterator[MicroBatch]:
    """The micro-batches of rank `rank` of `size`, with each action token's advantage and turn."""
    turns = signals.turns
    advantages = turns.spread(signals.turn_advantages, tokens)
    return rank_batches(tokens, advantages, split, rank, size, turns.of_tokens(len(tokens.token_ids)))


def pairs(group_ids: list[str], rewards: Floats) -> tuple[Ints, Ints]:
    """Of each group in the batch its best and its worst row, where they differ: int64 [p], [p]."""
    groups: dict[str, list[int]] = defaultdict(list)
    for row, group_id in enumerate(group_ids):
        if np.isfinite(rewards[row]):
            groups[group_id].append(row)
    ends = [(max(rows, key=rewards.__getitem__), min(rows, key=rewards.__getitem__)) for rows in groups.values()]
    found = [(best, worst) for best, worst in ends if rewards[best] > rewards[worst]]
    table = np.array(found, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _success_weights(successes: NDArray[np.bool_], num_tokens: Ints) -> NDArray[np.float32]:
    of_successes = int(num_tokens[successes].sum())
    return (successes * (num_tokens.sum() / max(of_successes, 1))).astype(np.float32)
