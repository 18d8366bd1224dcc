"""Results of the evaluator's earlier lives: from the topic, and from the lake where the run's log began anew."""

import json

from infra.kafka import Follower
from infra.lake import Lake
from schemas.messages import EvalResult
from schemas.settings import Settings
from schemas.topics import EVALS


def earlier(settings: Settings, client_id: str) -> list[EvalResult]:
    """All results so far, each once, oldest first."""
    known = {result.eval_id: result for result in (in_lake(Lake.of(settings)) if settings.run.life else [])}
    follower = Follower(settings.kafka, EVALS.name, EvalResult, client_id)
    try:
        known |= {result.eval_id: result for result in follower.poll()}
    finally:
        follower.close()
    return list(known.values())


def in_lake(lake: Lake) -> list[EvalResult]:
    """The results in table `evals`, oldest first."""
    rows = lake.read(EVALS.name, "earlier results").sort_by("finished_at").to_pylist()
    return [EvalResult.model_validate(row | {"families": json.loads(row["families"] or "{}")}) for row in rows]
