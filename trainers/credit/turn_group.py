"""Credit against the siblings at the same turn."""

import numpy as np

from schemas.settings import Credit
from trainers.batches import Floats
from trainers.credit.evidence import Evidence
from trainers.credit.group import scaled


def turn_group(evidence: Evidence, options: Credit) -> Floats:
    """Per turn k, [m]: (G_k - mean of the siblings' G_k) / std, with G_k what its row earns from turn k on, discounted.

    Siblings are those in the batch; the stream draws a group together. One that is missing (stale, dropped, evicted, in
    another batch) cannot vote, and where fewer than two reached turn k, the whole closed group's mean outcome, of which
    the missing are a part, stands in, discounted as the row's own. `std` is always the closed group's.
    Source: baselines by (group, turn) as in PipelineRL (arXiv 2509.19128); GiGPO (arXiv 2505.10978), equation 7.
    """
    e, turns = evidence, evidence.turns
    returns = turns.to_go(e.rewards, options.gamma)
    numbers, owners = turns.numbers, turns.owners
    places = e.groups[owners] * (int(numbers.max(initial=0)) + 1) + numbers
    scored = np.isfinite(returns)
    counts = np.bincount(places[scored], minlength=int(places.max(initial=0)) + 1)
    sums = np.bincount(places[scored], returns[scored], minlength=len(counts))
    left = np.diff(turns.bounds)[owners] - 1 - numbers
    whole = e.means[owners] * options.gamma**left
    baselines = np.where(counts[places] > 1, sums[places] / np.maximum(counts[places], 1), whole)
    if options.std:
        return scaled(returns - baselines, e.means[owners], e.stds[owners])
    return np.nan_to_num(returns - baselines, nan=0.0)
