"""The synchronous twin's rounds: one batch for a version, at that version, and then nothing until the next."""

from flows.steps.dispatcher import Dispatcher
from schemas.messages import BufferReport, ClosedGroup, LearnerReport, Task
from schemas.settings import Settings
from tests.unit.test_dispatcher import S, at, events, sent, weights


def settings(**dispatch: float) -> Settings:
    """Batches of 8, groups of 4: a round is two groups. Leases of 10 s."""
    return Settings.model_validate(
        {
            "run": {"name": "r"},
            "loop": {"mode": "sync", "group_size": 4, "batch_size": 8, "max_staleness": 0},
            "learner": {"sync_interval_start": 1, "sync_interval": 1},
            "dispatch": {"lease_s": 10, "updates_ahead": 5, **dispatch},
            "curate": {"group_timeout_s": 5},
            "families": [{"name": "add", "num_tasks": 50}],
        }
    )


def started() -> Dispatcher:
    """In its first round, at version 1, with the two groups of it open."""
    dispatcher = Dispatcher(settings())
    dispatcher.hear(weights(1))
    dispatcher.tick(S)
    return dispatcher


def report(*closed: Task, shard: str = "s000", live: dict[int, int], version: int = 1) -> BufferReport:
    return BufferReport(
        shard=shard,
        at=at(0),
        learner_version=version,
        trajectories={"admitted": 800 + sum(live.values())},
        tokens={},
        live=live,
        num_pending=0,
        closed=tuple(ClosedGroup(group_id=t.group_id, task_id=t.task_id, num_members=4, complete=True) for t in closed),
    )


def learner(available: int, version: int = 1) -> LearnerReport:
    return LearnerReport(
        at=at(0), weight_version=version, train_step=0, num_available=available, num_consumed=0, needs_per_step=8
    )


def test_a_round_opens_one_batch_and_no_more_while_the_learner_trains_on_it() -> None:
    dispatcher = started()
    first, second = sent(dispatcher)
    dispatcher.hear(report(first, live={1: 4}))
    dispatcher.tick(2 * S)
    assert set(dispatcher.state.leases) == {second.group_id}
    dispatcher.hear(report(second, shard="s001", live={1: 4}))
    dispatcher.hear(learner(0))  # it has taken the batch; the asynchronous twin would open more now
    for second_ in range(3, 8):
        dispatcher.tick(second_ * S)
    assert dispatcher.state.leases == {}


def test_the_next_round_begins_with_the_next_version_and_demands_it() -> None:
    dispatcher = started()
    first, second = sent(dispatcher)
    dispatcher.hear(report(first, second, live={1: 8}))
    dispatcher.tick(2 * S)
    dispatcher.hear(weights(2))  # before any shard has reported that what was of version 1 is gone
    dispatcher.tick(3 * S)
    assert [t.min_weight_version for t in sent(dispatcher)] == [2, 2]


def test_no_round_is_opened_for_the_weights_of_the_last_step_unless_the_run_is_made_longer() -> None:
    dispatcher = started()
    last = settings().learner.num_train_steps
    dispatcher.hear(report(*sent(dispatcher), live={1: 8}))
    dispatcher.hear(learner(0).model_copy(update={"train_step": last}))  # done, and its weights not yet published
    dispatcher.hear(weights(2).model_copy(update={"train_step": last}))
    dispatcher.tick(2 * S)
    dispatcher.hear(report(live={}, version=2))  # the batch is gone
    dispatcher.tick(3 * S)
    assert sent(dispatcher) == []
    longer = settings().model_copy(
        update={"learner": settings().learner.model_copy(update={"num_train_steps": last + 1})}
    )
    resumed = Dispatcher(longer, dispatcher.state)
    resumed.tick(4 * S)
    assert [t.min_weight_version for t in sent(resumed)] == [2, 2]


def test_a_group_without_signal_is_replaced_at_the_same_version() -> None:
    dispatcher = started()
    first, _ = sent(dispatcher)
    dispatcher.hear(report(first, live={}))
    dispatcher.tick(2 * S)
    assert [(t.draw, t.min_weight_version) for t in sent(dispatcher)] == [(2, 1)]


def test_one_missing_member_is_made_up_for_by_a_whole_group() -> None:
    dispatcher = started()
    first, second = sent(dispatcher)
    dispatcher.hear(report(first, second, live={1: 7}))
    dispatcher.tick(2 * S)
    assert len(sent(dispatcher)) == 1


def test_a_straggler_of_the_round_before_is_none_of_the_next_until_it_is_issued_again() -> None:
    dispatcher = started()
    first, straggler = sent(dispatcher)
    dispatcher.hear(report(first, live={1: 8}))
    dispatcher.hear(weights(2))
    dispatcher.tick(2 * S)
    assert len(sent(dispatcher)) == 2
    dispatcher.rows()
    for second in (6, 10, 11):  # its lease of 10 s ran out, a second before those of the round
        dispatcher.tick(second * S)
    assert events(dispatcher, "group_id") == [("reissued", straggler.group_id)]
    assert [t.min_weight_version for t in sent(dispatcher)] == [2]


def test_lost_groups_come_back_with_their_lease_at_the_version_of_the_round() -> None:
    dispatcher = started()
    lost = {t.group_id for t in sent(dispatcher)}
    for second in (5, 9, 11):
        dispatcher.tick(second * S)
    again = sent(dispatcher)
    assert {t.group_id for t in again} == lost
    assert {(t.attempt, t.min_weight_version) for t in again} == {(2, 1)}


def test_what_the_learner_cannot_use_is_made_up_for_after_a_lease() -> None:
    dispatcher = started()
    dispatcher.hear(report(*sent(dispatcher), live={1: 8}))
    dispatcher.tick(2 * S)
    for second in range(3, 13):  # full since 2 s
        dispatcher.hear(learner(3))
        dispatcher.tick(second * S)
    assert sent(dispatcher) == []
    dispatcher.hear(learner(3))
    dispatcher.tick(13 * S)
    assert len(sent(dispatcher)) == 2  # 5 are lacking
    dispatcher.hear(learner(3))
    dispatcher.tick(14 * S)
    assert sent(dispatcher) == []


def test_a_long_train_step_makes_no_round_late() -> None:
    """While it trains the learner reports nothing; its last word may be from before the batch was whole."""
    dispatcher = started()
    dispatcher.hear(report(*sent(dispatcher), live={1: 8}))
    dispatcher.tick(2 * S)
    dispatcher.hear(learner(3))
    for second in range(3, 300):
        dispatcher.tick(second * S)
    assert dispatcher.state.leases == {}


def test_a_restart_in_a_round_opens_nothing_twice() -> None:
    dispatcher = started()
    dispatcher.hear(report(sent(dispatcher)[0], live={1: 4}))
    dispatcher.tick(2 * S)
    state = type(dispatcher.state).from_bytes(dispatcher.end_epoch())
    again = Dispatcher(settings(), state)
    again.tick(3 * S)
    assert again.state.num_draws == 2
