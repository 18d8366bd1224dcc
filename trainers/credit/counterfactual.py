"""Credit against branches: what came of a turn, less what comes of it when it is taken anew."""

from collections.abc import Callable
from functools import wraps

import numpy as np

from schemas.settings import Credit
from trainers.batches import Floats
from trainers.credit.evidence import Evidence
from trainers.credit.group import scaled

Baseline = Callable[[Evidence, Credit], Floats]


def counterfactual(evidence: Evidence, advantages: Floats, options: Credit) -> Floats:
    """Per turn, [m]: (R - mean outcome of its branches + P) / std where it has any, `advantages` elsewhere.

    R is the trajectory's outcome, P what its process rewards still add up to, std the closed group's deviation where
    the configured baseline divides by it. The branches sample the turn from the policy and have the parent's luck in
    all else, so their mean depends on nothing that the turn chose: the gradient stays unbiased.
    Source: Foerster et al. 2018, counterfactual baseline (arXiv 1705.08926), equation 4, by rollouts as in VinePPO,
    Kazemnejad et al. 2024 (arXiv 2410.01679), equation 5.
    """
    e, owners = evidence, evidence.turns.owners
    if e.branch_means is None:
        return advantages
    differences = (e.outcomes[owners] - e.branch_means) + e.centered_process_to_go(options.gamma)
    is_forked = np.isfinite(differences)
    if options.std and options.baseline != "leave_one_out":
        differences = scaled(differences, e.means[owners], e.stds[owners])
    return np.where(is_forked, differences, advantages)


def with_branches(baseline: Baseline) -> Baseline:
    """`baseline`, but for the turns that have branches."""

    @wraps(baseline)
    def both(evidence: Evidence, options: Credit) -> Floats:
        return counterfactual(evidence, baseline(evidence, options), options)

    return both
