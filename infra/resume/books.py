"""Closing the books of a life of the run whose log is gone: what was in flight is named as lost.

Each function may be repeated: its rows carry a sequence of their own in the lake.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from infra import sql
from infra.lake import Lake
from schemas.messages import Directive
from schemas.names import Service
from schemas.topics import TRAJECTORIES

_BOOKS = "SELECT kind, in_flight FROM conservation"

_OPEN = """
SELECT group_id, any_value(task_id), any_value(task_family), max(attempt), any_value(group_size),
       max(min_weight_version)
FROM dispatches WHERE group_id NOT IN (SELECT group_id FROM groups)
GROUP BY group_id HAVING NOT bool_or(event = 'abandoned') ORDER BY group_id"""

_DIRECTIVES = "SELECT body FROM directives ORDER BY issued_at"

_ORDERS = ("min_weight_version", "family_weights", "bucket_weights", "learning_rate_scale")
_ISSUER = "resume"


def name_lost(lake: Lake, life: int, sequence: int) -> tuple[int, int]:
    """Write down what was in flight when life `life` began, as run manifest `sequence`; (trajectories, tokens).

    Totals of outboxes that had not reached the lake are made up for by what the ledger knows, so that nothing has an
    outcome without having been produced. What was finished after the last total, and sent nowhere, is not known.
    """
    in_flight = dict(_ask(lake, _BOOKS))
    trajectories, tokens = in_flight.get("trajectories", 0), in_flight.get("tokens", 0)
    now = datetime.now(UTC)
    if trajectories < 0 or tokens < 0:
        lake.append("usage", [_untold(life, max(-trajectories, 0), max(-tokens, 0), now)], _app(life), 1)
    lost = max(trajectories, 0), max(tokens, 0)
    if any(lost):
        lake.append("dead_letters", [_lost(life, sequence, *lost, now)], _app(life), 1)
    return lost


def abandon_open(lake: Lake, life: int) -> int:
    """Abandon the groups that were open when life `life` began; returns how many."""
    reason = "its tasks and trajectories were lost with the log of an earlier life of the run"
    rows = [
        {
            "group_id": group,
            "task_id": task,
            "task_family": family,
            "event": "abandoned",
            "attempt": attempt,
            "group_size": size,
            "reason": reason,
            "directive_id": None,
            "min_weight_version": oldest,
            "at": datetime.now(UTC),
        }
        for group, task, family, attempt, size, oldest in _ask(lake, _OPEN)
    ]
    if rows:
        lake.append("dispatches", rows, _app(life), 1)
    return len(rows)


def orders_in_force(lake: Lake) -> list[Directive]:
    """One directive for each target that was steered: the last value of each order, but never a pause."""
    found: dict[str, dict[str, Any]] = {}
    for (body,) in _ask(lake, _DIRECTIVES):
        directive = Directive.model_validate_json(body)
        orders = {name: value for name in _ORDERS if (value := getattr(directive, name)) is not None}
        if orders:
            merged = found.pop(directive.target, {}) | orders
            found[directive.target] = merged | {"target": directive.target}
    return [
        Directive(
            directive_id=f"{_ISSUER}-{datetime.now(UTC):%Y%m%d%H%M%S%f}-{target}",
            issued_by=_ISSUER,
            issued_at=datetime.now(UTC),
            reason="orders in force when the run resumed",
            **orders,
        )
        for target, orders in found.items()
    ]


def _ask(lake: Lake, query: str) -> Sequence[tuple[Any, ...]]:
    with sql.connect(lake) as connection:
        return connection.execute(query).fetchall()


def _lost(life: int, sequence: int, trajectories: int, tokens: int, now: datetime) -> dict[str, Any]:
    return {
        "topic": TRAJECTORIES.name,
        "partition": -1,
        "offset": life,
        "key": None,
        "value": None,
        "headers": json.dumps({"life": life, "run_manifest": sequence}),
        "error": f"in flight when the run resumed without its log: {trajectories} trajectories, {tokens} tokens",
        "num_rows": trajectories,
        "num_tokens": tokens,
        "kind": "lost",
        "at": now,
        "replayed_from": None,
    }


def _untold(life: int, trajectories: int, tokens: int, now: datetime) -> dict[str, Any]:
    """Produced trajectories that no outbox had told of before its log was lost."""
    return {
        "interval_id": f"{_ISSUER}-{life}",
        "service": Service.ROLLOUT,
        "instance": _ISSUER,
        "phase": _ISSUER,
        "started_at": now,
        "ended_at": now,
        "busy_s": 0.0,
        "idle_s": 0.0,
        "num_accelerators": 0,
        "num_tokens": 0,
        "num_episodes": 0,
        "num_failed": 0,
        "weight_version": None,
        "outbox": f"{_ISSUER}-{life}",
        "produced_trajectories": trajectories,
        "produced_tokens": tokens,
    }


def _app(life: int) -> str:
    return f"{_ISSUER}/{life}"
