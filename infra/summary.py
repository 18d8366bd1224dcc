"""What a run did, from its lake: the figures of `summary.json`, each by SQL."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb

from infra import sql
from infra.lake import Lake
from schemas.settings import Settings

OLD_VERSIONS = """
select coalesce(avg((staleness > 0)::int), 0) as share_older, coalesce(max(staleness), 0) as max_staleness,
       coalesce(avg(staleness), 0) as mean_staleness
from step_lineage"""

BUSY = """
select phase, started_at, ended_at, busy_s from usage
where phase in ('rollout', 'train') and ended_at > started_at"""

SCORES = """
select end_version, score from evals where score is not null
order by end_version, finished_at"""

DIRECTIVES = """
with steering as (select distinct directive_id from directives where issued_by like 'evaluator%'
),
obeyed as (
    select directive_id from dispatches union
    select directive_id from train_steps union
    select directive_id from ledger
)
select (select count(*) from steering) as sent,
       (select count(*) from steering semi join obeyed using (directive_id)) as obeyed"""

FAILED = "select count(*) from outcomes where status = 'failed'"

COUNTS = """
select (select count(*) from outcomes) as trajectories,
       (select count(distinct step) from step_lineage) as train_steps,
       (select count(*) from evals where score is not null) as evals"""


def summarize(settings: Settings, wall_s: float) -> dict[str, Any]:
    """The summary of the run whose lake `settings` name; `wall_s` is how long the run took, in seconds."""
    with sql.connect(Lake.of(settings), accelerator_hour=settings.cost.accelerator_hour) as lake:
        return {
            "run": settings.run.name,
            "conservation": {row.pop("kind"): row for row in sql.rows(lake, "select * from conservation")},
            "work": _row(lake, "select * from work"),
            "score": _score(lake),
            "train_steps": _value(lake, "select count(distinct step) from step_lineage"),
            "weight_versions": _value(lake, "select count(distinct version) from weights"),
            "staleness": _staleness(lake, settings.loop.max_staleness),
            "effective_sample_ratio": _value(lake, "select effective_sample_ratio from effective_samples"),
            "cost_per_effective_sample": _value(
                lake, "select cost_per_effective_sample from cost_per_effective_sample"
            ),
            "failed_episodes": _value(lake, FAILED),
            "events": {
                r["event"]: r["n"]
                for r in sql.rows(lake, "select event, count(*) as n from ledger group by 1 order by 1")
            },
            "probes": probes(settings.run.folder),
            "wall_s": round(wall_s, 1),
            "checks": _checks(lake, settings.loop.mode),
        }


def probes(run: Path) -> dict[str, Any]:
    """How often an engine of the run was asked to prove a weight version, and how it went.

    A line that was cut off, by a full disk or a kill, says nothing.
    """
    texts = [line for file in run.glob("cache/**/proofs.jsonl") for line in file.read_text().splitlines()]
    lines = [line for line in map(_line, texts) if line]
    exact = [line["difference"] for line in lines if line["exact"]]
    return {"loads": len(lines), "exact": len(exact), "largest_difference": max(exact, default=None)}


def _line(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _checks(lake: duckdb.DuckDBPyConnection, mode: str) -> dict[str, Any]:
    """The three checks of a first run: data flows, nobody waits (nothing is stale in mode sync), judgement steers."""
    counts = _row(lake, COUNTS)
    directives = _row(lake, DIRECTIVES)
    return {
        "data_flow": {**counts, "passed": all(v > 0 for v in counts.values())},
        **(_synchrony(lake) if mode == "sync" else _asynchrony(lake)),
        "evaluation": {**directives, "passed": directives["sent"] > 0 and directives["obeyed"] > 0},
    }


def _asynchrony(lake: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    older, overlap = _row(lake, OLD_VERSIONS)["share_older"], busy_overlap(sql.rows(lake, BUSY))
    figures = {
        "share_sampled_at_older_version": round(older, 4),
        "share_of_train_busy_time_with_rollouts_busy": round(overlap, 4),
    }
    return {"asynchrony": {**figures, "passed": older > 0 and overlap > 0}}


def _synchrony(lake: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    older = _row(lake, OLD_VERSIONS)["share_older"]
    return {"synchrony": {"share_sampled_at_older_version": round(older, 4), "passed": older == 0}}


def busy_overlap(intervals: list[dict[str, Any]], bin_s: float = 1.0) -> float:
    """The share of train-busy seconds in which rollouts were busy too, in [0, 1].

    Busy seconds are spread evenly over their interval and summed into bins; a bin's overlap is the lesser of both.
    """
    busy: dict[tuple[str, int], float] = {}
    for interval in intervals:
        start, end = _seconds(interval["started_at"]), _seconds(interval["ended_at"])
        for index in range(int(start // bin_s), int(end // bin_s) + 1):
            inside = min(end, (index + 1) * bin_s) - max(start, index * bin_s)
            key = (interval["phase"], index)
            busy[key] = busy.get(key, 0.0) + interval["busy_s"] * max(inside, 0.0) / (end - start)
    trained = {index: seconds for (phase, index), seconds in busy.items() if phase == "train"}
    both = sum(min(seconds, busy.get(("rollout", index), 0.0)) for index, seconds in trained.items())
    return both / total if (total := sum(trained.values())) else 0.0


def _score(lake: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    scores = [row["score"] for row in sql.rows(lake, SCORES)]
    return {
        "first": scores[0] if scores else None,
        "last": scores[-1] if scores else None,
        "best": max(scores, default=None),
    }


def _staleness(lake: duckdb.DuckDBPyConnection, bound: int) -> dict[str, Any]:
    histogram = sql.rows(lake, "select staleness, count(*) as n from step_lineage group by 1 order by 1")
    old = _row(lake, OLD_VERSIONS)
    return {
        "bound": bound,
        "max": old["max_staleness"],
        "mean": round(old["mean_staleness"], 3),
        "histogram": {str(row["staleness"]): row["n"] for row in histogram},
    }


def _seconds(value: datetime) -> float:
    return value.timestamp()


def _row(lake: duckdb.DuckDBPyConnection, query: str) -> dict[str, Any]:
    return sql.rows(lake, query)[0]


def _value(lake: duckdb.DuckDBPyConnection, query: str) -> Any:
    rows = sql.rows(lake, query)
    return next(iter(rows[0].values())) if rows else None


def to_json(summary: Mapping[str, Any]) -> str:
    """The summary as JSON text, numbers of the database included."""
    return json.dumps(summary, indent=2, default=float)
