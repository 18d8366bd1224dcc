"""The views of the lake, on rows small enough to work by hand."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from infra import sql
from infra.lake import Lake
from schemas.tables import TABLES
from tests.rows import AT, row
from trainers.records import begins_at


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path))
    lake.ensure()
    return lake


def fill(lake: Lake, table: str, *rows: dict[str, Any]) -> None:
    """Append `rows`, in a transaction of their own."""
    lake.append(table, [row(table, **r) for r in rows], f"test-{lake.version(table)}", 1)


def ask(lake: Lake, query: str, **options: Any) -> list[tuple[Any, ...]]:
    with sql.connect(lake, **options) as connection:
        return connection.sql(query).fetchall()


def outcome(number: int, event: str, tokens: int = 10, **values: Any) -> dict[str, Any]:
    fields = {
        "trajectory_id": f"t{number}",
        "offset": number,
        "num_tokens": tokens,
        "num_generated_tokens": tokens // 2,
    }
    return fields | {"event": event, **values}


def interval(number: int, phase: str, busy_s: float, idle_s: float, **values: Any) -> dict[str, Any]:
    start = AT + timedelta(seconds=2 * number)
    fields = {"interval_id": f"{phase}-{number}", "started_at": start, "ended_at": start + timedelta(seconds=2)}
    return fields | {"phase": phase, "busy_s": busy_s, "idle_s": idle_s, **values}


def step(number: int, incarnation: str = "i1", **values: Any) -> dict[str, Any]:
    return {"step": number, "incarnation": incarnation, "incarnation_at": AT, **values}


def sample(number: int, trajectory: int, incarnation: str = "i1", **values: Any) -> dict[str, Any]:
    return {"step": number, "trajectory_id": f"t{trajectory}", "incarnation": incarnation, **values}


def second_life(number: int, resumed_from: int, **values: Any) -> dict[str, Any]:
    later = AT + timedelta(hours=1)
    return step(number, "i2", incarnation_at=later, resumed_from_step=resumed_from, **values)


def test_every_view_says_first_what_it_answers():
    for name in sql.view_names():
        assert (sql.VIEWS / f"{name}.sql").read_text().startswith("-- "), name


def test_views_work_before_there_is_a_lake(tmp_path: Path):
    lake = Lake(str(tmp_path / "none"))
    with sql.connect(lake) as connection:
        for name in sql.view_names():
            connection.sql(f"SELECT * FROM {name}").fetchall()
        assert connection.sql("SELECT kind, produced, in_flight, balanced FROM conservation").fetchall() == [
            ("trajectories", 0, 0, True),
            ("tokens", 0, 0, True),
        ]


def test_a_live_connection_shows_rows_that_came_since_through_views_too(lake: Lake):
    live, query = sql.Live(lake), "SELECT (SELECT count(*) FROM ledger), (SELECT count(*) FROM outcomes)"
    assert live.ask(query) == [(0, 0)]
    for number in (1, 2):
        fill(lake, "ledger", outcome(number, "admitted"))
        assert live.ask(query) == [(number, number)]
    live.close()


def test_a_live_connection_looks_only_at_the_tables_that_a_query_reads_itself_or_through_views(lake: Lake):
    asked = list[str]()

    class Asked(Lake):
        def version(self, name: str) -> int:
            asked.append(name)
            return super().version(name)

    live = sql.Live(Asked(lake.uri))
    for query, tables in (
        ("SELECT count(*) FROM Outcomes", {"ledger"}),
        ('FROM "train_steps" JOIN evals ON true', {"train_steps", "evals"}),
        ("SELECT * FROM conservation", {"usage", "ledger", "dead_letters"}),  # through outcomes, letters
    ):
        asked.clear()
        live.ask(query)
        assert set(asked) == tables
    live.close()


def test_conservation_counts_each_outcome_and_what_is_still_in_flight(lake: Lake):
    events = ["admitted", "admitted", "stale", "duplicate", "no_signal", "invalid", "evicted", "redelivered"]
    fill(lake, "ledger", *(outcome(n, event, tokens=n + 1) for n, event in enumerate(events)))
    fill(lake, "dead_letters", {"kind": "undecodable", "num_rows": 3, "num_tokens": 30})
    # absolute totals: the newest of each outbox counts; 8 + 5 = 13 trajectories, 80 + 20 = 100 tokens
    totals = [("a", 8, 80), ("a", 2, 20), ("b", 5, 20)]
    fill(
        lake,
        "usage",
        *(
            {"interval_id": str(n), "outbox": o, "produced_trajectories": t, "produced_tokens": k}
            for n, (o, t, k) in enumerate(totals)
        ),
    )
    columns = "produced, admitted, stale, duplicate, no_signal, invalid, dead_lettered, in_flight, holes, balanced"
    assert ask(lake, f"SELECT kind, {columns} FROM conservation") == [
        ("trajectories", 13, 2, 1, 1, 1, 1, 3, 13 - 9, 0, True),
        ("tokens", 100, 1 + 2, 3, 4, 5, 6, 30, 100 - 51, 0, True),
    ]


def test_more_outcomes_than_trajectories_is_not_balanced(lake: Lake):
    fill(lake, "ledger", outcome(1, "admitted"), outcome(2, "stale"))
    fill(lake, "usage", {"outbox": "a", "produced_trajectories": 1, "produced_tokens": 100})
    assert ask(lake, "SELECT kind, in_flight, balanced FROM conservation") == [
        ("trajectories", -1, False),
        ("tokens", 80, True),
    ]


def test_two_outcomes_of_one_row_of_the_log_are_not_balanced(lake: Lake):
    fill(lake, "ledger", outcome(1, "admitted"), outcome(1, "stale"))
    fill(lake, "usage", {"outbox": "a", "produced_trajectories": 9, "produced_tokens": 100})
    assert ask(lake, "SELECT balanced FROM conservation") == [(False,), (False,)]


def test_a_hole_in_a_log_is_not_balanced_and_not_accounted_for(lake: Lake):
    fill(lake, "usage", {"outbox": "a", "produced_trajectories": 900, "produced_tokens": 9000})
    fill(lake, "ledger", *(outcome(n, "admitted") for n in range(500)))
    fill(lake, "dead_letters", {"kind": "hole", "num_rows": 400, "num_tokens": 0})
    assert ask(lake, "SELECT in_flight, holes, balanced FROM conservation WHERE kind = 'trajectories'") == [
        (400, 400, False)
    ]


def test_a_letter_that_was_sent_again_counts_once(lake: Lake):
    """Letters of 3 trajectories at 0, 1, 2. 0 came back as 5 and is a letter again, 1 as 6 and was read."""
    letter = {"topic": "trajectories", "kind": "undecodable", "num_rows": 3, "num_tokens": 30}
    fill(lake, "dead_letters", *({**letter, "offset": n} for n in range(3)))
    fill(lake, "usage", {"outbox": "a", "produced_trajectories": 9, "produced_tokens": 90})
    query = "SELECT admitted, dead_lettered, in_flight, balanced FROM conservation WHERE kind = 'trajectories'"
    assert ask(lake, query) == [(0, 9, 0, True)]

    fill(lake, "dead_letters", {**letter, "offset": 5, "replayed_from": "trajectories/0/0"})
    again = {"topic": "trajectories", "kind": "replayed", "offset": 6, "replayed_from": "trajectories/0/1"}
    fill(lake, "dead_letters", again)
    assert ask(lake, query) == [(0, 6, 3, True)]  # read, and waiting for the rest of its group
    fill(lake, "ledger", *(outcome(6, "admitted", row=n) for n in range(3)))
    assert ask(lake, query) == [(3, 6, 0, True)]
    assert ask(lake, 'SELECT "offset" FROM letters ORDER BY 1') == [(2,), (5,)]


def test_work_is_closed_abandoned_or_open(lake: Lake):
    fill(
        lake,
        "dispatches",
        *({"group_id": g, "event": "opened"} for g in ("closed", "late", "abandoned", "open")),
        {"group_id": "late", "event": "reissued"},
        {"group_id": "late", "event": "abandoned", "reason": "3 attempts"},
        {"group_id": "abandoned", "event": "abandoned", "reason": "3 attempts"},
    )
    fill(lake, "groups", {"group_id": "closed"}, {"group_id": "late"}, {"group_id": "imported"})
    columns = "dispatched, closed, abandoned, open, reissued, undispatched, balanced"
    assert ask(lake, f"SELECT {columns} FROM work") == [(4, 2, 1, 1, 1, 1, True)]


def test_work_that_closed_twice_or_was_abandoned_without_reason_is_not_balanced(lake: Lake):
    fill(lake, "dispatches", {"group_id": "a", "event": "opened"}, {"group_id": "a", "event": "abandoned"})
    assert ask(lake, "SELECT balanced FROM work") == [(False,)]
    fill(lake, "dispatches", {"group_id": "b", "event": "opened"})
    fill(lake, "groups", {"group_id": "b"}, {"group_id": "b"})
    assert ask(lake, "SELECT closed, balanced FROM work") == [(1, False)]


def test_steps_that_a_crash_undid_drop_out(lake: Lake):
    """Checkpoint at 40, crash at 50, resume: 41 to 50 of the first life are undone."""
    fill(lake, "train_steps", *(step(n) for n in (40, 41, 50)), *(second_life(n, 40) for n in (41, 42)))
    fill(lake, "train_samples", *(sample(n, n) for n in (40, 41, 50)), sample(41, 41, "i2"), sample(42, 50, "i2"))
    assert ask(lake, "SELECT step, incarnation FROM live_steps ORDER BY step") == [(40, "i1"), (41, "i2"), (42, "i2")]
    assert ask(lake, "SELECT step, trajectory_id FROM step_lineage") == [(40, "t40"), (41, "t41"), (42, "t50")]


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_of_two_lives_the_later_one_counts_whatever_the_clock_was_set_to_between_them(lake: Lake, hours: int):
    """The first trained 1 to 3 and saved step 1; the second goes on from there, and trains 2."""
    assert begins_at(lake, AT) == AT
    fill(lake, "train_steps", *(step(n) for n in (1, 2, 3)))
    later = begins_at(lake, AT + timedelta(hours=hours))
    fill(lake, "train_steps", step(2, "i2", incarnation_at=later, resumed_from_step=1))
    assert ask(lake, "SELECT step, incarnation FROM live_steps ORDER BY step") == [(1, "i1"), (2, "i2")]


def test_three_lives_that_resume_from_one_checkpoint_leave_one_value_per_step(lake: Lake):
    third = {"incarnation": "i3", "incarnation_at": AT + timedelta(hours=2), "resumed_from_step": 1}
    fill(lake, "train_steps", step(1), step(2), second_life(2, 1), second_life(3, 1), step(2) | third)
    assert ask(lake, "SELECT step, incarnation FROM live_steps ORDER BY step") == [(1, "i1"), (2, "i3")]


def test_lineage_tells_versions_ratios_and_what_came_of_a_step(lake: Lake):
    fill(
        lake,
        "train_steps",
        step(1, weight_version=4),
        step(2, weight_version=4, published_version=5, mlflow_run="run"),
        step(3, weight_version=5),
    )
    ratios = {"importance_ratio_mean": 1.25, "importance_ratio_max": 3.0}
    fill(lake, "train_samples", sample(1, 7, min_weight_version=2, staleness=2, delta_version=9, **ratios))
    fill(lake, "train_samples", sample(2, 8), sample(3, 9))
    fill(lake, "experience", {"trajectory_id": "t7", "task_id": "chain/1", "max_weight_version": 3})
    query = """
        SELECT step, trajectory_id, task_id, learner_version, min_weight_version, max_weight_version, staleness,
            importance_ratio_mean, importance_ratio_max, delta_version, published_version
        FROM step_lineage ORDER BY step"""
    first, second, third = ask(lake, query)
    assert first == (1, "t7", "chain/1", 4, 2, 3, 2, 1.25, 3.0, 9, 5)
    assert (second[0], second[-1], third[0], third[-1]) == (2, 5, 3, None)


def test_staleness_is_a_histogram_at_use_with_its_bound(lake: Lake):
    fill(lake, "train_steps", step(1))
    fill(lake, "train_samples", *(sample(1, n, staleness=s) for n, s in enumerate([0, 0, 1, 4])))
    query = "SELECT staleness, num_samples, share, within_bound FROM staleness"
    assert ask(lake, query, max_staleness=3) == [(0, 2, 0.5, True), (1, 1, 0.25, True), (4, 1, 0.25, False)]
    assert [r[3] for r in ask(lake, query)] == [None, None, None]


def test_effective_samples_are_divided_by_everything_produced(lake: Lake):
    fill(lake, "usage", {"outbox": "a", "produced_trajectories": 20, "produced_tokens": 200})
    # 3 + 5 = 8 of 20; clipped (0.1 * 100 + 0.5 * 300) / 400 = 0.4
    fill(
        lake,
        "train_steps",
        step(1, effective_sample_size=3.0, num_trajectories=4, clip_ratio=0.1, num_tokens=100),
        step(2, effective_sample_size=5.0, num_trajectories=8, clip_ratio=0.5, num_tokens=300),
    )
    [(steps, produced, trained, effective, ratio, unclipped)] = ask(lake, "SELECT * FROM effective_samples")
    assert (steps, produced, trained, effective, ratio) == (2, 20, 12, 8.0, 0.4)
    assert unclipped == pytest.approx(0.6)


def test_cost_counts_idle_hours_once_and_a_restart_adds_no_samples(lake: Lake):
    # rollouts 1 h busy + 1 h idle, learner 1 h busy; 3 h at 2.0 = 6.0; 4 + 4 effective samples -> 0.75 each
    rollout = interval(0, "rollout", 3600, 3600)
    fill(lake, "usage", rollout, rollout, interval(1, "train", 1800, 0), interval(2, "train", 1800, 0))
    fill(lake, "usage", interval(3, "eval", 360, 0))
    ess = {"effective_sample_size": 4.0}
    fill(lake, "train_steps", step(1, **ess), step(2, **ess), second_life(2, 1, **ess))
    query = "SELECT rollout_hours, train_hours, eval_hours, cost, effective_samples, cost_per_effective_sample"
    query += " FROM cost_per_effective_sample"
    assert ask(lake, query, accelerator_hour=2.0) == [(2.0, 1.0, 0.1, 6.0, 8.0, 0.75)]
    [(busy,)] = ask(lake, "SELECT busy_ratio FROM cost_per_effective_sample")
    assert busy == pytest.approx(2 / 3)


def test_without_effective_samples_there_is_no_price_of_one(lake: Lake):
    assert ask(lake, "SELECT cost, cost_per_effective_sample FROM cost_per_effective_sample") == [(0.0, None)]


def test_wasted_cost_is_told_by_reason(lake: Lake):
    paid = {"accelerator_s": 36.0}
    fill(lake, "ledger", *(outcome(n, "admitted", **paid) for n in range(3)), outcome(3, "stale", **paid))
    # t0 was trained on before it was evicted: no waste; t1 was not
    fill(lake, "ledger", outcome(0, "evicted", **paid), outcome(1, "evicted", **paid))
    fill(lake, "train_steps", step(1), step(2, busy_s=72.0, num_trajectories=1, num_tokens=5), second_life(2, 1))
    fill(lake, "train_samples", sample(1, 0))
    # 4 outcomes of 10 tokens and 36 s: 3.6 s a token; 20 tokens -> 72 s
    fill(lake, "dead_letters", {"kind": "undecodable", "num_rows": 2, "num_tokens": 20})
    fill(lake, "usage", interval(0, "rollout", 1.0, 360.0), interval(1, "train", 1.0, 0.0))
    rows = ask(lake, "SELECT * FROM wasted_cost ORDER BY reason", accelerator_hour=100.0)
    assert rows == [
        ("dead_lettered", 2, 20, pytest.approx(72.0), pytest.approx(2.0)),
        ("evicted", 1, 10, 36.0, pytest.approx(1.0)),
        ("idle_rollout", None, None, 360.0, pytest.approx(10.0)),
        ("stale", 1, 10, 36.0, pytest.approx(1.0)),
        ("undone_steps", 1, 5, 72.0, pytest.approx(2.0)),
    ]


def test_length_bias_shows_that_long_episodes_were_dropped(lake: Lake):
    """Action tokens 10, 20 trained, 90 stale, 40 evicted: produced mean 40, trained 15, dropped 65."""
    lengths = [(0, "admitted", 20), (1, "admitted", 40), (2, "stale", 180), (3, "admitted", 80)]
    fill(lake, "ledger", *(outcome(n, event, tokens, task_family="chain") for n, event, tokens in lengths))
    fill(lake, "ledger", outcome(3, "evicted", 80), outcome(0, "expired", 20))
    fill(lake, "train_steps", step(1), step(2))
    fill(lake, "train_samples", sample(1, 0), sample(1, 1), sample(2, 0))
    query = "SELECT population, num_trajectories, mean_length, p50_length, ratio_to_produced FROM length_bias"
    expected = [("produced", 4, 40.0, 30.0, 1.0), ("trained", 2, 15.0, 15.0, 0.375), ("dropped", 2, 65.0, 65.0, 1.625)]
    assert ask(lake, f"{query} WHERE task_family IS NULL") == expected
    assert ask(lake, f"{query} WHERE task_family = 'chain'") == expected


def test_a_task_that_is_always_too_late_is_named(lake: Lake):
    slow = {"task_id": "slow/1", "task_family": "slow"}
    fill(lake, "ledger", *(outcome(n, "stale", 100, **slow) for n in range(3)), outcome(3, "no_signal", 100, **slow))
    fill(lake, "ledger", outcome(4, "admitted", task_id="quick/1"), outcome(5, "stale", task_id="quick/1"))
    fill(lake, "train_steps", step(1))
    fill(lake, "train_samples", sample(1, 4))
    assert ask(lake, "SELECT task_id, num_trajectories, mean_length, reason FROM starved_tasks") == [
        ("slow/1", 4, 50.0, "stale")
    ]


def test_difficulty_carries_each_estimate_on_until_it_changes(lake: Lake):
    def estimate(task: str, version: int, mean: float, seconds: int = 0) -> dict[str, Any]:
        fields = {"task_id": task, "task_family": "chain", "weight_version": version, "success_mean": mean}
        return fields | {"is_hard": mean < 0.4, "num_groups": 1, "at": AT + timedelta(seconds=seconds)}

    fill(lake, "task_difficulty", estimate("a", 1, 0.2), estimate("b", 1, 0.6), estimate("a", 2, 0.3))
    fill(lake, "task_difficulty", estimate("a", 2, 0.4, seconds=1))
    found = ask(lake, "SELECT weight_version, task_family, num_tasks, success_mean, hard_ratio FROM difficulty")
    assert found == [(1, "chain", 2, pytest.approx(0.4), 0.5), (2, "chain", 2, pytest.approx(0.5), 0.0)]


def test_throughput_is_an_intervals_tokens_over_its_own_length(lake: Lake):
    """Intervals of 1,000 tokens in 2 s: 500 each, also when one is sent twice or the service restarts."""
    work = {"num_tokens": 1000, "num_accelerators": 1}
    fill(lake, "usage", *(interval(n, "train", 2.0, 0.0, instance="i1", **work) for n in range(2)))
    fill(lake, "usage", interval(1, "train", 2.0, 0.0, instance="i1", **work))
    fill(lake, "usage", interval(9, "train", 1.5, 0.5, instance="i2", **work))
    assert ask(lake, "SELECT tokens_per_s, busy_ratio FROM throughput") == [(500.0, 1.0), (500.0, 1.0), (500.0, 0.75)]


def test_unequal_on_a_partition_column_is_right_after_a_checkpoint(lake: Lake):
    fill(lake, "experience", *({"trajectory_id": f"t{n}", "version_bucket": n % 4} for n in range(12)))
    DeltaTable(lake.table_uri("experience")).create_checkpoint()
    fill(lake, "experience", {"trajectory_id": "t12", "version_bucket": 3})
    count = "SELECT count(*) FROM experience WHERE version_bucket"
    assert ask(lake, f"{count} != 3") == ask(lake, f"{count} IS DISTINCT FROM 3") == [(9,)]
    assert ask(lake, f"{count} = 3") == [(4,)]


def test_a_column_that_an_older_table_lacks_is_null(tmp_path: Path):
    lake = Lake(str(tmp_path))
    older = pa.schema([f for f in TABLES["groups"].delta_schema if f.name != "closed_by"])
    DeltaTable.create(lake.table_uri("groups"), older)
    old = {k: v for k, v in row("groups", group_id="g").items() if k != "closed_by"}
    write_deltalake(lake.table_uri("groups"), pa.Table.from_pylist([old], older), mode="append")
    assert ask(lake, "SELECT group_id, closed_by FROM groups") == [("g", None)]


def test_times_are_utc(lake: Lake):
    fill(lake, "usage", interval(0, "train", 1.0, 0.0))
    assert ask(lake, "SELECT started_at::VARCHAR FROM usage") == [("2026-11-01 12:00:00+00",)]
