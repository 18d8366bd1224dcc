"""What a shard decides: outcomes, late members, bounds, and that only the log matters."""

import dataclasses
import pickle
import random
from collections.abc import Sequence
from datetime import timedelta

import pytest

from flows.connectors.items import Raw
from flows.steps import groups as groups_module
from flows.steps.state import State
from schemas.errors import ContractError
from schemas.names import OUTCOMES
from schemas.trajectory import Trajectory, WeightVersionSpan
from tests.samples import NOON, T0_MS, broken, clock, control, group, message, trajectory, uid, weights
from tests.unit.curation import SETTINGS, Curation, feed_each


def curated(*items: Raw) -> Curation:
    curation = Curation()
    curation.feed(*items)
    return curation


def outcomes(curation: Curation) -> int:
    return sum(n for event, n in curation.count().items() if event in OUTCOMES)


# groups


def test_a_complete_group_is_admitted_with_its_statistics() -> None:
    curation = curated(weights(1, 0), message(group("a", [0.0, 1.0, 1.0, 0.0]), 3))
    rows = curation.rows["experience"]
    assert [row["reward"] for row in rows] == [0.0, 1.0, 1.0, 0.0]
    assert {row["group_reward_mean"] for row in rows} == {0.5}
    assert rows[0]["group_reward_std"] == pytest.approx((4 * 0.25 / 3) ** 0.5)
    assert {row["group_num_rewards"] for row in rows} == {4}
    assert [(row["partition"], row["offset"], row["row"]) for row in rows] == [(0, 3, i) for i in range(4)]
    assert rows[0]["token_ids"] == [11, 12, 13, 21, 22, 23]
    closed = curation.rows["groups"][0]
    assert (closed["num_members"], closed["closed_by"], closed["num_distinct"]) == (4, "complete", 4)


def test_a_group_that_comes_in_pieces_is_admitted_when_the_last_one_has_come() -> None:
    members = group("a", [0.0, 1.0, 1.0, 0.0])
    curation = Curation()
    for offset, member in enumerate(members[:3]):
        curation.feed(message([member], offset))
    assert curation.count() == {}
    curation.feed(message([members[3]], 3))
    assert curation.count() == {"admitted": 4}
    assert sorted(row["group_index"] for row in curation.rows["experience"]) == [0, 1, 2, 3]
    assert curation.log.reads == 0


def test_a_stuck_member_does_not_hold_its_group_and_is_judged_by_it_when_it_comes_late() -> None:
    members = group("a", [0.0, 1.0, 1.0, 0.0])
    curation = Curation()
    curation.feed(weights(1, 0), message(members[:3], 0, at_s=1))
    curation.restart()
    curation.feed(clock(0, at_s=5.9))
    assert curation.count() == {}
    curation.feed(clock(1, at_s=6))  # group_timeout_s is 5
    assert curation.count() == {"admitted": 3}
    closed = curation.rows["groups"]
    assert [(g["num_members"], g["num_rewards"], g["closed_by"]) for g in closed] == [(3, 3, "timeout")]
    curation.feed(message(members[3:], 1, at_s=20))
    assert curation.count() == {"admitted": 4}
    assert len(curation.rows["groups"]) == 1  # not reopened
    late = curation.rows["experience"][-1]
    assert late["group_reward_mean"] == pytest.approx(2 / 3)
    assert late["group_num_rewards"] == 3


def test_a_group_cancelled_in_part_closes_with_those_that_came_and_takes_in_those_of_its_next_lease() -> None:
    """3 of 8 came before the cancel; the group closes by time-out, and the lease is rolled out again from the start.

    https://github.com/huggingface/trl/issues/7176
    """
    members = group("a", [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    again = [dataclasses.replace(member, trajectory_id=uid("again", i)) for i, member in enumerate(members)]
    curation = curated(weights(1, 0), message(members[:3], 0, 1), clock(0, 6))
    assert curation.count() == {"admitted": 3}
    assert [(g["group_size"], g["num_members"], g["closed_by"]) for g in curation.rows["groups"]] == [(8, 3, "timeout")]
    curation.feed(message(again, 1, at_s=20))
    assert curation.count() == {"admitted": 3 + 5, "duplicate": 3}
    assert len(curation.rows["groups"]) == 1
    assert curation.curator.state.open == {}


def test_a_late_member_of_a_group_without_signal_has_none_either() -> None:
    members = group("a", [1.0, 1.0, 1.0, 0.0])
    curation = curated(message(members[:3], 0), clock(0, 6), message(members[3:], 1, 7))
    assert curation.count() == {"no_signal": 4}
    assert curation.rows["ledger"][-1]["reason"].startswith("came after the close")


def test_zero_variance_is_no_signal_and_still_teaches_difficulty() -> None:
    curation = curated(message(group("a", [0.0] * 4), 0))
    assert curation.count() == {"no_signal": 4}
    assert curation.rows["experience"] == []
    assert curation.rows["groups"][0]["zero_variance"]
    estimate = curation.rows["task_difficulty"][0]
    assert (estimate["alpha"], estimate["beta"], estimate["num_groups"]) == (1, 5, 1)
    assert estimate["success_mean"] == pytest.approx(1 / 6)
    assert estimate["is_hard"]


def test_failed_infrastructure_has_no_vote_and_does_not_count_as_wrong() -> None:
    curation = curated(message(group("a", [0.0, 1.0, None, 1.0]), 0))
    assert curation.count() == {"admitted": 3, "no_signal": 1}
    reason = next(row["reason"] for row in curation.rows["ledger"] if row["event"] == "no_signal")
    assert reason == "no reward: environment failed"
    assert curation.rows["groups"][0]["num_members"] == 4
    assert curation.rows["groups"][0]["reward_mean"] == pytest.approx(2 / 3)
    assert curation.rows["task_difficulty"][0]["beta"] == 2  # one wrong answer, not two


def test_an_invalid_member_takes_its_place_without_a_vote() -> None:
    members = group("a", [0.0, 1.0, 1.0, 1.0])
    members[3] = dataclasses.replace(members[3], behavior_logprobs=(0.0, 0.0, 0.0, float("nan"), -1.0, -1.0))
    curation = curated(message(members, 0))
    assert curation.count() == {"admitted": 3, "invalid": 1}
    assert curation.rows["groups"][0]["num_rewards"] == 3
    assert next(r["reason"] for r in curation.rows["ledger"] if r["event"] == "invalid").startswith(
        "a behavior logprob"
    )


def test_a_member_that_contradicts_its_group_is_invalid_and_changes_nothing() -> None:
    members = group("a", [0.0, 1.0, 1.0, 1.0])
    liar = dataclasses.replace(members[3], group_size=2)
    curation = curated(message([*members[:3], liar], 0), message(members[3:], 1))
    assert curation.count() == {"admitted": 4, "invalid": 1}


def test_a_group_with_one_reward_has_no_signal() -> None:
    curation = curated(message(group("a", [1.0]), 0))
    assert curation.events("reason") == [("no_signal", "1 rewards in the group: nothing to compare with")]


# staleness


def test_staleness_is_counted_from_the_oldest_action_token() -> None:
    spans = (WeightVersionSpan(0, 4, 7), WeightVersionSpan(4, 6, 8))
    swapped = trajectory(
        "a", 0, 2, 7, reward=0.0, max_weight_version=8, weight_version_spans=spans
    )  # 11 - 7 = 4 > 3; a stamp of 8 would give 3
    curation = curated(weights(11, 0), message([swapped, trajectory("a", 1, 2, 8)], 0))
    assert curation.events("reason") == [("stale", "staleness 4 is above 3"), ("admitted", None)]
    assert curation.rows["experience"][0]["staleness"] == 3


def test_a_stale_member_still_counts_in_its_groups_baseline() -> None:
    stale = trajectory("a", 0, 2, 1, reward=0.0)
    fresh = trajectory("a", 1, 2, 5, reward=1.0)
    curation = curated(weights(5, 0), message([stale, fresh], 0))
    assert curation.count() == {"admitted": 1, "stale": 1}
    assert curation.rows["experience"][0]["group_reward_mean"] == 0.5


def test_a_member_that_gets_old_while_its_group_is_open_is_stale_at_the_close() -> None:
    members = group("a", [0.0, 1.0], version=1)
    curation = curated(weights(1, 0), message(members[:1], 0), weights(5, 1), message(members[1:], 1))
    assert curation.count() == {"stale": 2}


def test_a_version_ahead_of_its_summary_is_believed_for_that_trajectory_alone() -> None:
    curation = curated(weights(2, 0), message(group("a", [0.0, 1.0], version=3), 0))
    assert curation.count() == {"admitted": 2}
    assert {row["staleness"] for row in curation.rows["experience"]} == {0}
    assert curation.curator.state.learner_version == 2


def test_a_version_that_cannot_be_published_yet_is_invalid() -> None:
    # the newest known is 2; summaries may lag by max_staleness + 1 = 4 versions
    curation = curated(
        weights(2, 0), message(group("a", [0.0, 1.0], version=6), 0), message(group("b", [0.0], version=7), 1)
    )
    assert curation.count() == {"admitted": 2, "invalid": 1}
    assert "not published" in curation.rows["ledger"][-1]["reason"]


def test_what_lives_expires_when_the_learner_moves_on() -> None:
    curation = curated(weights(1, 0), message(group("a", [0.0, 1.0], version=1), 0), weights(4, 1), weights(5, 2))
    assert curation.count() == {"admitted": 2, "expired": 2}
    assert curation.rows["ledger"][-1]["reason"] == "staleness 4 is above 3"
    assert curation.curator.state.live.size == 0


# duplicates


def test_the_same_place_twice_is_a_duplicate_open_or_closed() -> None:
    members = group("a", [0.0, 1.0])
    again = dataclasses.replace(members[0], trajectory_id=uid("again"))
    late = dataclasses.replace(members[0], trajectory_id=uid("late"))
    curation = curated(message([members[0], again], 0), message(members[1:], 1), message([late], 2))
    assert curation.count() == {"admitted": 2, "duplicate": 2}


def test_a_known_trajectory_id_is_a_duplicate_whatever_its_group() -> None:
    first, second = group("a", [0.0, 1.0])
    thief = dataclasses.replace(group("b", [0.0, 1.0])[0], trajectory_id=first.trajectory_id.upper())
    curation = curated(message([first, second], 0), message([thief], 1))
    assert curation.events("reason")[-1] == ("duplicate", "trajectory_id is known")


def test_equal_answers_of_siblings_are_no_duplicates() -> None:
    members = group("a", [0.0, 1.0], token_ids=(1, 2, 3, 4, 5, 6))
    curation = curated(message(members, 0))
    assert curation.count() == {"admitted": 2}
    assert curation.rows["groups"][0]["num_distinct"] == 1


def test_equal_content_is_a_duplicate_among_imports() -> None:
    first = group("a", [0.0, 1.0], origin="import")
    second = [
        dataclasses.replace(t, trajectory_id=uid(i), group_id=uid("b"), origin="import") for i, t in enumerate(first)
    ]
    assert curated(message(first, 0), message(second, 1)).count() == {"admitted": 2, "duplicate": 2}


def test_a_redelivered_message_has_no_second_outcome() -> None:
    a = message(group("a", [0.0, 1.0]), 0, outbox="o", sequence=1)
    again = dataclasses.replace(a, offset=1)
    curation = curated(a, again)
    assert curation.count() == {"admitted": 2, "redelivered": 2}
    assert outcomes(curation) == 2


# difficulty and priority


def test_a_low_success_rate_makes_a_task_hard_and_its_trajectories_precious() -> None:
    curation = curated(message(group("a", [0.0, 0.0, 0.0, 1.0]), 0))
    # Beta(1 + 1, 1 + 3): mean 1/3, below hard_below 0.4
    winner = curation.rows["experience"][3]
    assert winner["is_hard"]
    # |1 - 1/3| + 0.25 hard + 0.25 fresh + 0.1 completed
    assert winner["priority"] == pytest.approx(2 / 3 + 0.6)


def test_evidence_fades_by_version() -> None:
    curation = curated(
        weights(1, 0), message(group("a", [1.0] * 4), 0), weights(2, 1), message(group("b", [0.0] * 4, version=2), 1)
    )
    first, second = curation.rows["task_difficulty"]
    assert (first["alpha"], first["beta"]) == (5, 1)
    assert (second["alpha"], second["beta"]) == (pytest.approx(1 + 4 * 0.9), 5)


def test_evals_do_not_change_a_tasks_difficulty() -> None:
    assert curated(message(group("a", [0.0, 1.0], origin="eval"), 0)).rows["task_difficulty"] == []


# eviction and directives


def small() -> Curation:
    """Capacity of 64 over 16 shards: a group a shard."""
    curate = SETTINGS.curate.model_copy(update={"capacity": 64, "max_evicted_share": 1.0})
    return Curation(SETTINGS.model_copy(update={"curate": curate}))


def test_a_full_shard_evicts_the_least_telling_group_and_says_so() -> None:
    curation = small()
    curation.feed(message(group("a", [0.0, 1.0, 1.0, 1.0]), 0))
    assert curation.count() == {"admitted": 4}
    curation.restart()
    curation.feed(message(group("b", [0.0, 1.0, 1.0, 0.0]), 1))
    # a: Beta(4, 2), mean 2/3: its signals are 2/3 and three of 1/3, 5/12 in the mean; b: Beta(6, 4), mean 0.6: two of
    # 0.6 and two of 0.4, 1/2 in the mean. So a goes, its loser too, which tells more than any row of b
    gone = [row for row in curation.rows["ledger"] if row["event"] == "evicted"]
    assert [(row["offset"], row["row"], row["reason"]) for row in gone] == [
        (0, i, "the shard is full") for i in range(4)
    ]
    assert curation.count() == {"admitted": 8, "evicted": 4}
    curation.feed(weights(9, 0))
    assert curation.count() == {"admitted": 8, "evicted": 4, "expired": 4}


def test_who_comes_after_its_group_was_evicted_leaves_too_and_pushes_nobody_out() -> None:
    curation = small()
    curation.feed(message(group("a", [1.0, 1.0, 0.0, 0.0])[:3], 0), clock(0, at_s=6))  # group_timeout_s is 5
    curation.feed(message(group("b", [0.0, 1.0, 1.0, 0.0]), 1, at_s=7))
    assert curation.count() == {"admitted": 7, "evicted": 3}
    curation.restart()
    curation.feed(message(group("a", [1.0, 1.0, 0.0, 0.0])[3:], 2, at_s=8))
    assert curation.count() == {"admitted": 8, "evicted": 4}
    assert curation.rows["ledger"][-1]["reason"] == "its group was evicted before it came"
    assert curation.curator.state.live.size == 4


def test_a_directive_raises_the_least_version_and_is_named_in_the_ledger() -> None:
    curation = Curation()
    curation.feed(
        weights(3, 0),
        message(group("a", [0.0, 1.0], version=2), 0),
        control(0, 1, "order-1", min_weight_version=3),
        message(group("b", [0.0, 1.0], version=2), 1, 2),
        message(group("c", [0.0, 1.0], version=3), 2, 3),
    )
    assert curation.events("directive_id") == [
        *[("admitted", None)] * 2,
        *[("expired", "order-1")] * 2,
        *[("stale", "order-1")] * 2,
        *[("admitted", "order-1")] * 2,
    ]
    assert curation.rows["ledger"][2]["reason"] == "below weight version 3, the least by directive order-1"


def test_a_version_that_nobody_published_is_no_least_version_and_spoils_nothing() -> None:
    """The learner is at version 1, the bound 3: 6 = 1 + 3 + 2 cannot be news that is still on its way."""
    future = control(1, 1, "b", pause=True, min_weight_version=2, issued_at=NOON + timedelta(days=365))
    curation = curated(
        weights(1, 0), control(0, 0, "a", min_weight_version=6), future, message(group("a", [0.0, 1.0]), 0, 2)
    )
    assert curation.events("directive_id") == [("admitted", None)] * 2


def test_bucket_weights_raise_the_priority_of_recent_buckets() -> None:
    plain = curated(message(group("a", [0.0, 1.0]), 0)).rows["experience"][0]["priority"]
    order = control(0, 0, bucket_weights=(5.0, 1.0))
    raised = curated(order, message(group("a", [0.0, 1.0]), 0)).rows["experience"][0]["priority"]
    assert raised == pytest.approx(plain + 4 * 0.25)


def test_directives_for_others_are_not_followed() -> None:
    curation = curated(control(0, 0, target="learner", min_weight_version=9), message(group("a", [0.0, 1.0]), 0))
    assert curation.events("directive_id") == [("admitted", None)] * 2


# reports


def test_a_clock_message_brings_a_report_when_there_is_news_and_only_then() -> None:
    curation = Curation()
    curation.feed(clock(0, 0), message(group("a", [0.0, 1.0]), 0, 1), clock(1, 2), clock(2, 3))
    assert len(curation.reports) == 1
    report = curation.reports[0]
    assert report.at.timestamp() * 1000 == T0_MS + 2000
    assert report.trajectories == {"admitted": 2}
    assert report.tokens == {"admitted": 12}
    assert report.live == {1: 2}
    assert [(c.num_members, c.complete) for c in report.closed] == [(2, True)]
    assert [p.task_id for p in report.posteriors] == ["add/7"]


def test_totals_of_reports_are_absolute_and_closed_groups_are_told_once() -> None:
    curation = Curation()
    curation.feed(message(group("a", [0.0, 1.0]), 0), clock(0, 1))
    curation.restart()
    curation.feed(message(group("b", [0.0, 1.0]), 1, 2), message(group("c", [1.0], version=1), 2, 2), clock(1, 3))
    assert curation.reports[1].trajectories == {"admitted": 4, "no_signal": 1}
    assert [c.group_id for c in curation.reports[1].closed] == [uid("group", "b"), uid("group", "c")]


# state


def test_payloads_of_open_groups_are_read_again_after_a_restart() -> None:
    members = group("a", [0.0, 1.0])
    curation = Curation()
    curation.feed(message(members[:1], 0))
    curation.restart()
    curation.feed(message(members[1:], 1))
    assert curation.log.reads == 1
    rows = {row["group_index"]: row for row in curation.rows["experience"]}
    assert rows[0]["token_ids"] == [11, 12, 13, 21, 22, 23]
    assert rows[1]["token_ids"] == [11, 12, 13, 22, 22, 23]
    assert [rows[i]["offset"] for i in (0, 1)] == [0, 1]


def test_a_payload_that_has_expired_is_an_outcome_with_its_reason() -> None:
    members = group("a", [0.0, 1.0])
    curation = Curation()
    curation.feed(message(members[:1], 0))
    curation.restart()
    curation.log.bodies.clear()
    curation.feed(message(members[1:], 1))
    assert curation.count() == {"admitted": 1, "invalid": 1}
    assert "was gone before its group closed" in next(
        r["reason"] for r in curation.rows["ledger"] if r["event"] == "invalid"
    )


def test_state_holds_no_payload() -> None:
    long = tuple(range(5000))
    big = {
        "token_ids": long,
        "action_mask": (True,) * 5000,
        "behavior_logprobs": (-1.0,) * 5000,
        "num_generated_tokens": 5000,
        "num_prompt_tokens": 0,
    }
    curation = curated(message([trajectory("a", i, 16, **big) for i in range(15)], 0))
    assert curation.count() == {}
    assert len(curation.curator.state.to_bytes()) < 10_000


def test_a_state_of_another_format_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match="format 99"):
        State.from_bytes(pickle.dumps((99, None)))


def test_closed_groups_are_forgotten_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "MAX_CLOSED", 3)
    curation = Curation()
    for i in range(5):
        curation.feed(message(group(i, [0.0, 1.0]), i))
    state = curation.curator.state
    assert list(state.closed) == [uid("group", i) for i in (2, 3, 4)]
    assert len(state.known_ids()) == 6


def script() -> list[Raw]:
    """A log in which everything happens."""
    a, b, c = group("a", [0.0, 1.0, 1.0, 0.0]), group("b", [1.0] * 4), group("c", [0.0, 1.0, None, 1.0], version=2)
    nan = dataclasses.replace(group("d", [0.0, 1.0])[0], reward=float("nan"))
    return [
        weights(1, 0, 0),
        message(a[:2], 0, 1, outbox="o", sequence=0),
        message(b, 1, 1, outbox="o", sequence=1),
        clock(0, 2),
        message(a[2:3], 2, 2, outbox="o", sequence=2),
        message(b, 3, 3, outbox="o", sequence=1),
        weights(2, 1, 3),
        broken(4, 3),
        message([nan], 5, 4),
        control(1, 5, "order-1", bucket_weights=(4.0, 1.0)),
        message(c, 6, 5, outbox="o", sequence=3),
        clock(2, 7),
        message(a[3:], 7, 8, outbox="o", sequence=4),
        message([dataclasses.replace(a[3], trajectory_id=uid("x"))], 8, 8),
        weights(5, 2, 9),
        weights(6, 3, 10),
        clock(3, 11),
    ]


def test_decisions_do_not_depend_on_how_messages_fall_into_calls() -> None:
    one_by_one = feed_each(Curation(), script())
    assert {"admitted", "duplicate", "expired", "invalid", "no_signal", "redelivered"} <= set(one_by_one.count())
    rng = random.Random(3)
    for _ in range(30):
        curation, items = Curation(), script()
        while items:
            n = rng.randint(1, 6)
            curation.feed(*items[:n])
            items = items[n:]
            if rng.random() < 0.3:
                curation.restart()
        for table in ("ledger", "groups", "task_difficulty", "dead_letters"):
            assert curation.rows[table] == one_by_one.rows[table]
        assert sorted_rows(curation) == sorted_rows(one_by_one)
        assert curation.reports == one_by_one.reports


def sorted_rows(curation: Curation) -> list[dict[str, object]]:
    return sorted(curation.rows["experience"], key=lambda row: row["trajectory_id"])


def test_counts_in_equal_counts_out_for_any_mixture() -> None:
    rng = random.Random(11)
    for trial in range(40):
        items, num_in = mixture(rng, trial)
        curation = feed_each(Curation(), items) if trial % 2 else curated(*items)
        assert outcomes(curation) == num_in
        rows = [(r["partition"], r["offset"], r["row"]) for r in curation.rows["ledger"] if r["event"] in OUTCOMES]
        assert len(set(rows)) == num_in


def mixture(rng: random.Random, trial: int) -> tuple[list[Raw], int]:
    """A log of whole, torn, repeated and damaged groups, closed by a last clock message; and its trajectories."""
    items: list[Raw] = [weights(3, 0, 0)]
    num_in = 0
    for offset in range(30):
        members: Sequence[Trajectory] = group(
            (trial, rng.randrange(6)), rng.choices([0.0, 1.0, None], k=4), version=rng.randint(1, 4)
        )
        if rng.random() < 0.2:
            members = [dataclasses.replace(m, reward=float("inf")) for m in members]
        part = rng.sample(members, rng.randint(1, 4))
        num_in += len(part)
        items.append(message(part, offset, offset))
        if rng.random() < 0.2:
            items.append(weights(rng.randint(3, 6), offset + 1, offset))
    return [*items, clock(0, 1000)], num_in


def test_damaged_bytes_never_crash_a_shard() -> None:
    rng = random.Random(5)
    sound = message(group("a", [0.0, 1.0, 0.0, 1.0], error="x"), 0)
    for trial in range(400):
        body = bytearray(sound.value)
        for _ in range(rng.randint(1, 8)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        curation = curated(dataclasses.replace(sound, value=bytes(body)), clock(0, 100))
        rows = curation.rows["dead_letters"]
        assert outcomes(curation) + sum(row["num_rows"] for row in rows) >= 1, trial
