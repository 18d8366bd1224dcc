"""Whether one evaluation is better than others by more than chance, task by task where they share tasks."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

from inference.scoring import two_proportion_z
from schemas.messages import EvalResult


@dataclass(frozen=True, slots=True)
class Evidence:
    """What speaks for the policy of `better` being better than that of `worse`.

    Attributes:
        p: Bound of the chance of evidence as clear if it is not.
        how: The test, in words.
    """

    better: EvalResult
    worse: EvalResult
    p: float
    how: str


def clearest(pairs: Iterable[tuple[EvalResult, EvalResult]]) -> Evidence:
    """The clearest evidence of some (better, worse), at least one; its `p` is corrected for the choice.

    By Bonferroni: the least p times their number. However they depend on one another, it is below alpha with a chance
    of at most alpha if no policy is better; the best of several noisy scores needs no other allowance.
    """
    found = [_evidence(better, worse) for better, worse in pairs]
    best = min(found, key=lambda evidence: evidence.p)
    p = min(1.0, best.p * len(found))
    return Evidence(best.better, best.worse, p, f"{best.how}, p {p:.2g} of {len(found)} compared")


def one_sided(z: float) -> float:
    """The chance that a standard normal variable is above `z`."""
    return NormalDist().cdf(-z)


def mcnemar(num_won: int, num_lost: int) -> float:
    """The p of McNemar's test (Psychometrika 12, 1947, p. 153), exact and one-sided, of tasks that only one solved.

    P(X >= num_won), X ~ Binomial(num_won + num_lost, ½): if the policies are equally good, each of these tasks is as
    likely won as lost. If they are so on the whole but not task by task, won less lost varies less: p errs upwards.
    """
    num_tasks = num_won + num_lost
    return sum(math.comb(num_tasks, k) for k in range(num_won, num_tasks + 1)) / 2**num_tasks


def _evidence(better: EvalResult, worse: EvalResult) -> Evidence:
    pairs = _pairs(better, worse)
    if pairs:
        won, lost = pairs["1", "0"], pairs["0", "1"]
        return Evidence(better, worse, mcnemar(won, lost), f"McNemar's test, {won} tasks to {lost}")
    z = two_proportion_z(better.score or 0.0, better.num_scored, worse.score or 0.0, worse.num_scored)
    return Evidence(better, worse, one_sided(z), f"z of two proportions {z:.2f}")


def _pairs(a: EvalResult, b: EvalResult) -> Counter[tuple[str, str]]:
    """How often tasks that both scored ended how; empty without any, as with results from before outcomes were kept."""
    shared = a.families.keys() & b.families.keys()
    pairs = Counter(p for name in shared for p in zip(a.families[name].by_task, b.families[name].by_task, strict=False))
    return Counter({pair: count for pair, count in pairs.items() if "-" not in pair})
