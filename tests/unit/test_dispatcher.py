"""Leases, reissues, pauses, and what survives a restart."""

from datetime import UTC, datetime
from typing import Any

import pytest

from flows.steps.dispatcher import MAX_FORKS, Dispatcher, State
from schemas.ids import group_id
from schemas.messages import (
    Branch,
    BufferReport,
    ClosedGroup,
    Directive,
    Fork,
    LearnerReport,
    Task,
    TaskPosterior,
    WeightSummary,
)
from schemas.settings import Settings

S = 1000


def settings(**dispatch: Any) -> Settings:
    return Settings.model_validate(
        {
            "run": {"name": "r", "seed": 7},
            "loop": {"group_size": 4, "batch_size": 8, "max_staleness": 3},
            "learner": {"sync_interval_start": 1},
            "dispatch": {"lease_s": 10, "max_attempts": 2, "updates_ahead": 2, "tick_s": 0.5, **dispatch},
            "curate": {"group_timeout_s": 5},
            "families": [{"name": "add", "num_tasks": 50, "options": {"kind": "add"}}],
        }
    )


def weights(version: int) -> WeightSummary:
    return WeightSummary(version=version, fingerprint="f", num_bytes=1, train_step=1, created_at=at(0))


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def learner(available: int, ms: int) -> LearnerReport:
    return LearnerReport(
        at=at(ms), weight_version=1, train_step=1, num_available=available, num_consumed=0, needs_per_step=8
    )


def closing(*tasks: Task, admitted: int = 0, ms: int = 0) -> BufferReport:
    return BufferReport(
        shard="s000",
        at=at(ms),
        learner_version=1,
        trajectories={"admitted": admitted},
        tokens={},
        live={},
        num_pending=0,
        closed=tuple(ClosedGroup(group_id=t.group_id, task_id=t.task_id, num_members=4, complete=True) for t in tasks),
    )


def directive(**orders: Any) -> Directive:
    return Directive.model_validate(
        {"directive_id": "d1", "target": "dispatch", "issued_by": "evaluator", "issued_at": at(0), **orders}
    )


def started(**dispatch: Any) -> Dispatcher:
    dispatcher = Dispatcher(settings(**dispatch))
    dispatcher.hear(weights(1))
    return dispatcher


def sent(dispatcher: Dispatcher) -> list[Task]:
    dispatcher.end_epoch()
    return dispatcher.send()


def events(dispatcher: Dispatcher, *keys: str) -> list[Any]:
    batch = dispatcher.rows()
    return [tuple(row[k] for k in ("event", *keys)) for row in (batch.to_pylist() if batch else [])]


def test_nothing_is_dispatched_before_the_first_weight_version() -> None:
    dispatcher = Dispatcher(settings())
    dispatcher.tick(0)
    assert dispatcher.state.leases == {}
    dispatcher.hear(weights(1))
    dispatcher.tick(S)
    assert len(dispatcher.state.leases) == 4  # updates_ahead 2 * batch 8 / group 4


def test_a_task_says_all_that_a_rollout_needs() -> None:
    dispatcher = started()
    dispatcher.tick(S)
    task = sent(dispatcher)[0]
    assert (task.draw, task.attempt, task.group_size, task.family) == (0, 1, 4, "add")
    assert task.group_id == group_id("r", task.task_id, 0)
    assert task.seed == 7  # of the run: the same task is the same problem at every draw
    assert task.options == {"kind": "add"}
    assert task.min_weight_version == 1
    assert (task.lease_until - task.dispatched_at).total_seconds() == 10
    assert task.index < 40


def test_a_task_is_sent_only_when_its_decision_is_durable() -> None:
    dispatcher = started()
    dispatcher.tick(S)
    assert dispatcher.send() == []  # a tick within the epoch proves nothing about it
    dispatcher.end_epoch()
    assert len(dispatcher.send()) == 4
    assert dispatcher.send() == []


def test_a_crash_repeats_the_same_tasks_and_never_draws_others_for_them() -> None:
    dispatcher = started()
    dispatcher.tick(S)
    body = dispatcher.end_epoch()
    first = dispatcher.send()
    again = Dispatcher(settings(), State.from_bytes(body))
    assert again.send() == first
    assert again.state.num_draws == 4


def test_a_closed_group_makes_room_for_another() -> None:
    dispatcher = started()
    dispatcher.tick(S)
    tasks = sent(dispatcher)
    dispatcher.hear(closing(tasks[0], tasks[1], admitted=4))
    dispatcher.tick(2 * S)  # 16 = 2 open groups of 4 + 4 admitted that the learner has not counted + 1 more group
    assert len(dispatcher.state.leases) == 3
    assert tasks[0].group_id not in dispatcher.state.leases


def test_what_the_learner_holds_counts_against_the_window() -> None:
    dispatcher = started()
    dispatcher.hear(learner(9, S))
    dispatcher.tick(S)
    assert len(dispatcher.state.leases) == 1


def test_a_lease_that_runs_out_is_issued_again_under_the_same_group_id_then_abandoned() -> None:
    dispatcher = started(updates_ahead=1)
    dispatcher.hear(directive(target="all"))
    dispatcher.tick(S)
    first = sent(dispatcher)
    assert events(dispatcher, "attempt", "reason") == [("opened", 1, "exploration"), ("opened", 1, None)]
    for second in (5, 9, 11):
        dispatcher.tick(second * S)
    second_issue = sent(dispatcher)
    assert [t.group_id for t in second_issue] == [t.group_id for t in first]
    assert {t.attempt for t in second_issue} == {2}
    assert events(dispatcher, "attempt", "reason") == [("reissued", 2, "its lease ran out")] * 2
    for second in (16, 21):
        dispatcher.tick(second * S)
    assert events(dispatcher, "reason")[:2] == [("abandoned", "2 leases of 10 s ran out")] * 2
    assert not {t.group_id for t in first} & set(dispatcher.state.leases)
    assert len(dispatcher.state.leases) == 2  # others took their place


def test_time_that_the_dispatcher_was_away_does_not_count_against_a_lease() -> None:
    dispatcher = started(updates_ahead=1)
    dispatcher.tick(S)
    again = Dispatcher(settings(updates_ahead=1), State.from_bytes(dispatcher.end_epoch()))
    again.tick(3_000 * S)
    assert events(again) == []
    for step in range(1, 11):
        again.tick((3_000 + step) * S)
    assert events(again) == [("reissued",)] * 2


@pytest.mark.parametrize("hours", [2, -2])
def test_a_clock_that_is_set_moves_leases_along_and_stops_no_work(hours: int) -> None:
    dispatcher, jump = started(), hours * 3600 * S
    dispatcher.tick(10 * 3600 * S)
    open_ = sent(dispatcher)
    dispatcher.hear(closing(*open_[:2], admitted=8))
    dispatcher.rows()
    dispatcher.tick(10 * 3600 * S + jump)
    assert {event for (event,) in events(dispatcher)} <= {"opened"}  # nothing ran out
    dispatcher.hear(learner(0, 0))  # whatever the learner's own clock says: it has used the 8
    dispatcher.tick(10 * 3600 * S + jump + 5 * S)
    dispatcher.hear(learner(0, 0))
    dispatcher.tick(10 * 3600 * S + jump + 9 * S)
    assert ("opened",) in events(dispatcher) or len(dispatcher.state.leases) > 2
    dispatcher.rows()
    dispatcher.tick(10 * 3600 * S + jump + 11 * S)  # 11 s by the clock: the leases of 10 s that were left
    assert ("reissued",) in events(dispatcher)


def test_a_pause_opens_nothing_and_lets_what_is_open_come_home() -> None:
    dispatcher = started(updates_ahead=1)
    dispatcher.tick(S)
    tasks = sent(dispatcher)
    dispatcher.rows()
    dispatcher.hear(directive(pause=True))
    dispatcher.hear(closing(tasks[0]))
    for second in (6, 11):
        dispatcher.tick(second * S)
    assert events(dispatcher, "reason") == [("abandoned", "its lease ran out while dispatch was paused")]
    assert dispatcher.state.leases == {}
    dispatcher.hear(directive(pause=False))
    dispatcher.tick(12 * S)
    assert len(dispatcher.state.leases) == 2


def test_directives_are_followed_and_named() -> None:
    dispatcher = started(exploration=0)
    dispatcher.hear(directive(min_weight_version=4, family_weights={"add": 2.0}))
    dispatcher.hear(weights(5))
    dispatcher.tick(S)
    assert set(events(dispatcher, "directive_id", "min_weight_version")) == {("opened", "d1", 4)}
    assert dispatcher.state.family_weights == {"add": 2.0}


def test_a_pause_that_nobody_lifts_ends_after_a_day() -> None:
    dispatcher = started()
    dispatcher.hear(directive(pause=True))
    dispatcher.tick(86_399 * S)
    assert dispatcher.state.leases == {}
    dispatcher.tick(86_400 * S)
    assert len(dispatcher.state.leases) == 4


def test_a_version_that_nobody_published_and_an_order_from_the_future_are_refused() -> None:
    """Version 1 is the newest, the bound 3: a minimum of 5 may be news on its way, 6 cannot be."""
    dispatcher = started()
    dispatcher.tick(S)
    dispatcher.hear(directive(directive_id="a", min_weight_version=5))
    dispatcher.hear(directive(directive_id="b", min_weight_version=6))
    dispatcher.hear(directive(directive_id="c", pause=True, issued_at=at(302 * S)))
    dispatcher.tick(2 * S)
    assert (dispatcher.state.directive_id, dispatcher.state.min_weight_version) == ("a", 5)
    assert dispatcher.state.pause is None


def test_directives_for_others_are_not_followed() -> None:
    dispatcher = started()
    dispatcher.hear(directive(target="learner", pause=True))
    dispatcher.tick(S)
    assert len(dispatcher.state.leases) == 4
    assert dispatcher.state.directive_id is None


def test_a_task_may_not_be_rolled_out_by_weights_that_would_be_stale() -> None:
    dispatcher = started()
    dispatcher.hear(weights(9))
    dispatcher.tick(S)
    assert {t.min_weight_version for t in sent(dispatcher)} == {6}


def test_posteriors_of_reports_reach_the_draw() -> None:
    dispatcher = started()
    report = closing().model_copy(
        update={"posteriors": (TaskPosterior(task_id="add/3", alpha=2, beta=9, weight_version=1),)}
    )
    dispatcher.hear(report)
    dispatcher.hear(report)  # a repeat is harmless
    assert dispatcher.state.posteriors["add/3"].beta == 9


def test_a_resume_at_version_100_has_the_capacity_of_a_start() -> None:
    dispatcher = Dispatcher(settings(updates_ahead=100))
    dispatcher.hear(weights(100))
    dispatcher.tick(S)
    assert len(dispatcher.state.leases) * 4 == 32  # (max_staleness 3 + 1) * batch 8


def test_the_clock_message_carries_the_time_of_the_reading() -> None:
    dispatcher = started()
    dispatcher.tick(1234)
    assert dispatcher.clock().target == "clock"
    assert dispatcher.clock().issued_at == at(1234)


def test_work_is_conserved_whatever_happens() -> None:
    dispatcher, ledger = started(), []
    for step in range(200):
        dispatcher.tick(step * S)
        ledger += events(dispatcher, "group_id")
        tasks = sent(dispatcher)
        dispatcher.hear(closing(*tasks[::3], admitted=4 * step))
        dispatcher.hear(learner(step % 20, step * S))
    opened = [g for event, g in ledger if event == "opened"]
    abandoned = [g for event, g in ledger if event == "abandoned"]
    assert len(set(opened)) == len(opened)
    assert len(set(abandoned)) == len(abandoned)
    assert abandoned
    assert set(abandoned) <= set(opened)
    assert not set(abandoned) & set(dispatcher.state.leases)
    assert set(dispatcher.state.leases) <= set(opened)


# branches


def fork(number: int = 0) -> Fork:
    branch = Branch(parent_id=f"p{number}", group_id="g", group_index=2, attempt=1, token_ids=(1, 2, 3))
    return Fork(group_id=f"f{number}", num_branches=3, task_id="add/7", family="add", index=7, branch=branch)


def test_branches_are_leases_that_take_no_room_from_other_groups() -> None:
    dispatcher = started()
    dispatcher.tick(S)
    dispatcher.rows()
    dispatcher.hear(fork())
    dispatcher.hear(fork())  # delivered twice
    (task,) = [t for t in sent(dispatcher) if t.branch]
    assert (task.group_id, task.group_size, task.origin, task.environment) == ("f0", 3, "counterfactual", "calculator")
    assert (task.task_id, task.index, task.options, task.seed) == ("add/7", 7, {"kind": "add"}, 7)
    assert task.branch == fork().branch
    assert events(dispatcher, "group_id", "reason") == [("opened", "f0", "branches of p0 at turn 1")]
    dispatcher.tick(2 * S)
    assert len(dispatcher.state.leases) == 4 + 1
    dispatcher.hear(closing(task).model_copy(update={"trajectories": {"admitted": 3}, "num_branches": 3}))
    dispatcher.tick(3 * S)
    assert len(dispatcher.state.leases) == 4  # 16 = 4 groups of 4; the branches are none of the learner's supply


def test_branches_that_do_not_come_are_issued_again_and_then_given_up() -> None:
    dispatcher = started()
    dispatcher.tick(S)
    dispatcher.hear(fork())
    for at_s in range(2, 25):
        dispatcher.tick(at_s * S)
    mine = [e for e in events(dispatcher, "group_id", "attempt") if e[1] == "f0"]
    assert mine == [("opened", "f0", 1), ("reissued", "f0", 2), ("abandoned", "f0", 2)]


def test_branches_that_cannot_be_had_now_are_refused_with_a_row() -> None:
    dispatcher = started()
    dispatcher.tick(S)
    for number in range(MAX_FORKS + 1):
        dispatcher.hear(fork(number))
    dispatcher.hear(directive(pause=True))
    dispatcher.hear(fork(MAX_FORKS + 1))
    refused = [e[1:] for e in events(dispatcher, "group_id", "reason") if e[0] == "abandoned"]
    assert refused == [
        (f"f{MAX_FORKS}", f"{MAX_FORKS} groups of branches are open"),
        (f"f{MAX_FORKS + 1}", "it was asked for while dispatch was paused"),
    ]


def test_branches_of_a_family_that_is_not_in_the_settings_are_not_opened() -> None:
    dispatcher = started()
    dispatcher.tick(S)
    dispatcher.hear(fork().model_copy(update={"family": "gone"}))
    assert [t for t in sent(dispatcher) if t.branch] == []
