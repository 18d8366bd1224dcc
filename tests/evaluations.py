"""Eval results of given outcomes."""

from collections.abc import Mapping
from types import MappingProxyType

from inference.scoring import wilson
from schemas.messages import EvalResult, FamilyScore
from tests.rollout_fakes import NOW


def evaluated(
    version: int,
    solved: int,
    num_scored: int,
    *,
    num_unscored: int = 0,
    families: Mapping[str, FamilyScore] = MappingProxyType({}),
) -> EvalResult:
    """A light evaluation of `version`; without a score where nothing was scored."""
    low, high = wilson(solved, num_scored)
    return EvalResult(
        eval_id=str(version),
        kind="light",
        requested_version=version,
        start_version=version,
        end_version=version,
        score=solved / num_scored if num_scored else None,
        low=low,
        high=high,
        num_scored=num_scored,
        num_unscored=num_unscored,
        families=dict(families),
        started_at=NOW,
        finished_at=NOW,
    )


def outcome(version: int, **families: str) -> EvalResult:
    """A light evaluation of `version`; the tasks of `families` ended as letters say, see `FamilyScore.by_task`."""
    scores = {name: _family(letters) for name, letters in families.items()}
    solved, num_scored = "".join(families.values()).count("1"), sum(s.num_scored for s in scores.values())
    num_unscored = sum(s.num_unscored for s in scores.values())
    return evaluated(version, solved, num_scored, num_unscored=num_unscored, families=scores)


def _family(letters: str) -> FamilyScore:
    lost, num_scored = letters.count("-"), len(letters) - letters.count("-")
    score = letters.count("1") / num_scored
    return FamilyScore(score=score, num_scored=num_scored, num_unscored=lost, by_task=letters)
