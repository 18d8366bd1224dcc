"""Evals, usage, weights and directives become rows, each message exactly once; what nobody can read is kept."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bytewax.testing as bytewax
import pytest

from flows.connectors.delta_sink import DeltaSink
from flows.connectors.items import Hole, Raw, Tick
from flows.records import build
from flows.steps.records import TABLES, TOPICS, to_rows
from infra.lake import Lake
from schemas.messages import Directive, EvalResult, FamilyScore, Message, UsageInterval, WeightSummary

AT = datetime(2026, 11, 29, 12, 0, 0, 250000, UTC)

WEIGHT = WeightSummary(version=3, parent=2, fingerprint="ab", num_bytes=10, train_step=15, created_at=AT)
EVAL = EvalResult(
    eval_id="e1",
    kind="light",
    requested_version=3,
    start_version=3,
    end_version=4,
    score=0.5,
    num_scored=2,
    num_unscored=1,
    families={"chain": FamilyScore(score=0.5, num_scored=2, num_unscored=1, by_task="1-0")},
    started_at=AT,
    finished_at=AT + timedelta(seconds=2),
)
INTERVAL = UsageInterval(
    interval_id="i1",
    service="rollout",
    instance="r0",
    phase="rollout",
    started_at=AT,
    ended_at=AT + timedelta(seconds=2),
    busy_s=1.5,
    idle_s=0.5,
    outbox="o1",
    produced_trajectories=7,
    produced_tokens=700,
)
DIRECTIVE = Directive(
    directive_id="d1", target="learner", issued_by="evaluator", issued_at=AT, reason="fell", learning_rate_scale=0.5
)
CLOCK = Directive(directive_id="c1", target="clock", issued_by="dispatch", issued_at=AT)


def raw(topic: str, message: Message | bytes, offset: int = 0, headers: tuple[tuple[str, bytes], ...] = ()) -> Raw:
    body = message.to_bytes() if isinstance(message, Message) else message
    return Raw(topic, 0, offset, 1_000, b"key", headers, body)


def only(items: list[Any]) -> tuple[str, dict[str, Any]]:
    """Table and cells of the one row that `items` become."""
    [(table, batch)] = to_rows(items)
    [row] = batch.to_pylist()
    return table, row


def test_a_usage_interval_keeps_its_totals() -> None:
    table, row = only([raw("usage", INTERVAL)])
    assert table == "usage"
    assert row == INTERVAL.model_dump()


def test_a_weight_version_is_a_row() -> None:
    table, row = only([raw("weights", WEIGHT)])
    assert table == "weights"
    assert row == WEIGHT.model_dump()


def test_an_eval_keeps_all_three_versions_and_its_families() -> None:
    table, row = only([raw("evals", EVAL)])
    assert table == "evals"
    assert (row["requested_version"], row["start_version"], row["end_version"]) == (3, 3, 4)
    families = {"chain": {"score": 0.5, "num_scored": 2, "num_unscored": 1, "by_task": "1-0"}}
    assert json.loads(row["families"]) == families
    assert row["low"] is None


def test_a_directive_is_kept_whole_and_the_clock_is_not() -> None:
    table, row = only([Tick(), raw("control", CLOCK), raw("control", DIRECTIVE)])
    assert table == "directives"
    assert Directive.model_validate_json(row["body"]) == DIRECTIVE
    assert (row["directive_id"], row["issued_at"]) == ("d1", AT)


@pytest.mark.parametrize("body", [b"", b"\xff\x00", b"{}", b"[]", EVAL.to_bytes(), b'{"version": NaN}'])
def test_a_message_that_cannot_be_read_is_kept_byte_for_byte(body: bytes) -> None:
    table, row = only([raw("weights", body, offset=9, headers=(("h", b"\x01"),))])
    assert table == "dead_letters"
    assert (row["topic"], row["partition"], row["offset"], row["kind"]) == ("weights", 0, 9, "undecodable")
    assert (row["value"], row["key"], row["headers"]) == (body, b"key", '[["h", "01"]]')
    assert row["at"] == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert row["error"]


def test_no_message_of_these_topics_counts_as_a_trajectory() -> None:
    assert only([raw("usage", b"?")])[1]["num_rows"] == 0


def test_a_number_that_no_column_can_hold_is_a_dead_letter() -> None:
    table, row = only([raw("weights", WEIGHT.model_copy(update={"parent": 2**70}))])
    assert table == "dead_letters"
    assert "does not fit" in row["error"]


def test_a_total_that_no_run_reaches_is_a_dead_letter_for_the_books_add_totals_up() -> None:
    report = INTERVAL.model_copy(update={"produced_tokens": 2**62})
    assert only([raw("usage", report)])[0] == "dead_letters"


def test_a_hole_is_a_row_that_says_which_offsets_are_gone() -> None:
    table, row = only([Hole("usage", 0, 100, 500, 1_000)])
    assert table == "dead_letters"
    assert (row["kind"], row["offset"], row["num_rows"]) == ("hole", 100, 0)
    [(_, of_trajectories)] = to_rows([Hole("trajectories", 0, 100, 500, 1_000)])
    assert of_trajectories["num_rows"].to_pylist() == [400]  # unaccounted, as the conservation view shows
    assert json.loads(row["headers"]) == {"start": 100, "end": 500, "num_messages": 400}
    assert "[100,500)" in row["error"]


def test_the_flow_writes_each_message_to_its_table(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    lake.ensure()
    messages = [raw("usage", INTERVAL), raw("evals", EVAL), raw("weights", WEIGHT), raw("control", DIRECTIVE)]
    items = [Tick(), *messages, raw("control", CLOCK), raw("usage", b"?"), Tick()]
    flow = build(bytewax.TestingSource(items), lambda table: DeltaSink(lake, table, "records", 1))
    bytewax.run_main(flow, epoch_interval=timedelta(0))
    counts = {table: lake.table(table).to_pyarrow_table().num_rows for table in TABLES if lake.version(table)}
    assert counts == dict.fromkeys(TABLES, 1)


def test_step_ids_and_topics_are_for_ever() -> None:
    """Recovery state hangs on them: a renamed step starts without its state."""
    assert TOPICS == ("evals", "usage", "weights", "control")
    assert TABLES == ("evals", "usage", "weights", "directives", "dead_letters")
    flow = build(bytewax.TestingSource([]), lambda table: DeltaSink(Lake("unused"), table, "records", 1))
    outputs = [step.step_id for step in flow.substeps if "write" in step.step_id and "_write_" not in step.step_id]
    assert outputs == [f"records.{table}_write" for table in TABLES]
    assert flow.substeps[0].step_id == "records.source"
