"""Forks: which turns of a closed group are worth branches, what they may cost, and what becomes of the branches."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.steps.forks import Candidate, candidates, choose
from flows.steps.purse import MAX_ASKED, Purse
from schemas.ids import fork_id
from schemas.messages import Fork
from schemas.settings import Kafka, Settings
from schemas.trajectory import Trajectory, Turn, WeightVersionSpan
from tests.samples import group, message, trajectory, uid, weights
from tests.unit.curation import SETTINGS, Curation

BUDGET = 2.0


def curation(budget: float = BUDGET, branches: int = 2) -> Curation:
    credit = {"credit": {"fork_budget": budget, "fork_branches": branches}}
    found = Curation(Settings.model_validate(SETTINGS.model_dump() | credit))
    found.feed(weights(1, 0))
    return found


def two_turns(name: object, rewards: list[float | None], **changes: Any) -> list[Trajectory]:
    """Two tokens of prompt, an action of two (p = 0.9 each), one of observation, an action of one (p = 1/2)."""
    turns = (Turn(2, 4, 5, "look", "{}"), Turn(5, 6, 6))
    logprobs = (0.0, 0.0, math.log(0.9), math.log(0.9), 0.0, math.log(0.5))
    cells: dict[str, Any] = {
        "turns": turns,
        "behavior_logprobs": logprobs,
        "action_mask": (False, False, True, True, False, True),
        "num_prompt_tokens": 2,
        "num_generated_tokens": 3,
    }
    return group(name, rewards, **cells | changes)


def branches_of(fork: Fork, rewards: list[float | None]) -> list[Trajectory]:
    """The episodes that `fork` asks for; each samples 3 tokens after a prompt of 3."""
    changes = {"origin": "counterfactual", "parent_id": fork.branch.parent_id, "group_id": fork.group_id}
    return group(("branch", fork.group_id), rewards, **changes)


def test_the_dearest_turns_are_taken_while_their_cost_is_within_what_is_left() -> None:
    found = [Candidate(0, 0, 0.1, 10), Candidate(0, 1, 0.9, 6), Candidate(1, 0, 0.5, 9), Candidate(1, 1, 0.6, 3)]
    # 2 branches each: 12, then 6; 18 is too much for the 10 left, and 0.1 is below the typical 0.25
    assert choose(found, std=0.5, typical=0.25, left=28, num_branches=2) == [found[1], found[3]]
    assert choose(found, std=0.5, typical=0.25, left=36, num_branches=2) == [found[1], found[3], found[2]]
    assert choose(found, std=0.5, typical=0.0, left=1000, num_branches=2) == [found[1], found[3], found[2], found[0]]


def test_a_budget_that_pays_for_all_turns_of_a_group_forks_the_ordinary_ones_too() -> None:
    found = [Candidate(0, 0, 0.1, 10), Candidate(0, 1, 0.9, 6)]  # 2 branches each: 32; 0.1 x 0.5 is below the typical
    assert choose(found, std=0.5, typical=0.25, left=32, num_branches=2) == [found[1], found[0]]
    assert choose(found, std=0.5, typical=0.25, left=31, num_branches=2) == [found[1]]


def test_a_group_without_variance_and_a_turn_without_a_doubt_are_worth_nothing() -> None:
    assert choose([Candidate(0, 0, 0.7, 1)], std=0.0, typical=0.0, left=100, num_branches=1) == []
    assert choose([Candidate(0, 0, 0.0, 1)], std=0.5, typical=0.0, left=100, num_branches=1) == []


def test_a_turn_is_judged_by_what_its_siblings_did_there_and_not_by_what_it_chose_itself() -> None:
    one = ([(1, 3), (4, 5)], [0.0, -1.0, -3.0, 0.0, -0.5])  # surprise 2 at cost 3, 0.5 at cost 1
    two = ([(1, 2), (3, 5)], [0.0, -4.0, 0.0, -1.0, -2.0])  # 4 at cost 3, 1.5 at cost 2
    three = ([(1, 2)], [0.0, -6.0])  # 6 at cost 1
    assert candidates([one, two, three]) == [
        Candidate(0, 0, 5.0, 2.0),  # the mean of 4 and 6, of 3 and 1
        Candidate(0, 1, 1.5, 2.0),
        Candidate(1, 0, 4.0, 2.0),
        Candidate(1, 1, 0.5, 1.0),
        Candidate(2, 0, 3.0, 3.0),
    ]
    assert candidates([one]) == []  # nobody to judge it by


@given(st.floats(-20, 0), st.integers(0, 2))
def test_however_unlikely_an_action_is_it_changes_nothing_about_its_own_worth(logprob: float, member: int) -> None:
    plain = [([(1, 2)], [0.0, -1.0 - index]) for index in range(3)]
    changed = [*plain[:member], ([(1, 2)], [0.0, logprob]), *plain[member + 1 :]]
    assert candidates(changed)[member].surprise == pytest.approx(candidates(plain)[member].surprise)


@pytest.mark.parametrize("spans", [[(0, 2)], [(1, 3), (2, 4)], [(3, 4), (1, 2)], [(4, 9)], [(2, 2)]])
def test_turns_that_do_not_follow_one_another_are_not_forked(spans: list[tuple[int, int]]) -> None:
    logprobs = [0.0, -1.0, -1.0, -1.0, -1.0]
    sound = ([(1, 2), (3, 4)], logprobs)
    assert {found.parent for found in candidates([sound, (spans, logprobs), sound])} == {0, 2}


def test_the_unsure_turn_is_forked_with_what_was_before_it_and_its_parent_says_so() -> None:
    found = curation()
    found.feed(message(two_turns("a", [1.0, 0.0, 0.0, 0.0]), 0))
    # worth: std x 0.105 and std x 0.693, the mean lies between; all would cost 32, more than 2.0 x 12; these cost 8
    assert [f.branch.turn for f in found.forks] == [1] * 4
    first = found.forks[0]
    assert (first.branch.parent_id, first.branch.group_id) == (uid("trajectory", "a", 0), uid("group", "a"))
    assert (first.branch.group_index, first.branch.attempt) == (0, 1)
    assert (first.branch.token_ids, first.branch.actions) == ((11, 12, 13, 21, 22), ((2, 4),))
    assert first.branch.action == (23,)
    assert (first.group_id, first.num_branches) == (fork_id(uid("trajectory", "a", 0), 1), 2)
    assert (first.task_id, first.family, first.index) == ("add/7", "add", 7)
    assert [row["forked_turns"] for row in found.rows["experience"]] == [[1]] * 4


def test_a_group_whose_members_came_in_pieces_is_forked_like_one_that_came_whole() -> None:
    members = two_turns("a", [1.0, 0.0, 0.0, 0.0])
    found = curation()
    for offset, member in enumerate(members[:3]):
        found.feed(message([member], offset))
    found.restart()  # what came before is read from the log again
    found.feed(message(members[3:], 3))
    whole = curation()
    whole.feed(message(members, 0))
    assert found.forks == whole.forks != []


def test_a_fork_that_no_message_could_hold_is_not_asked_for() -> None:
    more = 100  # tokens of prompt, of 4 bytes each in a message; half of 1024 bytes may be a fork's
    cells = {
        "token_ids": (*[900] * more, 11, 12, 13, 14, 15, 16),
        "turns": (Turn(more + 2, more + 4, more + 5), Turn(more + 5, more + 6, more + 6)),
        "behavior_logprobs": (*[0.0] * more, 0.0, 0.0, math.log(0.9), math.log(0.9), 0.0, math.log(0.5)),
        "action_mask": (*[False] * more, False, False, True, True, False, True),
        "num_prompt_tokens": more + 2,
        "weight_version_spans": (WeightVersionSpan(0, more + 6, 1),),
    }
    for limit, expected in ((1024, 0), (2048, 4)):
        found = curation()
        found = Curation(found.settings.model_copy(update={"kafka": Kafka(max_message_bytes=limit)}))
        found.feed(weights(1, 0), message(two_turns("a", [1.0, 0.0, 0.0, 0.0], **cells), 0))
        assert len(found.forks) == len(found.curator.state.purse.asked) == expected
        assert [row["forked_turns"] for row in found.rows["experience"]] == [[1] if expected else None] * 4


def test_without_a_budget_no_turn_is_forked() -> None:
    found = curation(budget=0.0)
    found.feed(message(two_turns("a", [1.0, 0.0, 0.0, 0.0]), 0))
    assert found.forks == []
    assert [row["forked_turns"] for row in found.rows["experience"]] == [None] * 4


def test_branches_are_admitted_though_they_are_alike_and_tell_nothing_about_their_task() -> None:
    found = curation()
    found.feed(message(two_turns("a", [1.0, 0.0, 0.0, 0.0]), 0))
    live, estimates = found.curator.state.live.size, len(found.rows["task_difficulty"])
    for number, fork in enumerate(found.forks, 1):
        found.feed(message(branches_of(fork, [1.0, 1.0]), number))
    assert found.count() == {"admitted": 4 + 8}
    rows = found.rows["experience"][4:]
    assert {(r["parent_id"], r["group_id"]) for r in rows} == {(f.branch.parent_id, f.group_id) for f in found.forks}
    assert {(r["origin"], r["group_reward_mean"], r["group_num_rewards"]) for r in rows} == {("counterfactual", 1.0, 2)}
    assert (found.curator.state.live.size, len(found.rows["task_difficulty"])) == (live, estimates)
    assert len(found.forks) == 4  # branches are not forked again


def test_a_branch_that_failed_has_an_outcome_and_the_others_are_admitted() -> None:
    found = curation()
    found.feed(message(two_turns("a", [1.0, 0.0, 0.0, 0.0]), 0))
    found.feed(message(branches_of(found.forks[0], [None, 0.0]), 1))
    assert found.events("reason")[4:] == [
        ("no_signal", "no reward: environment failed"),
        ("admitted", None),
    ]
    assert found.rows["experience"][-1]["group_num_rewards"] == 1


def test_branches_that_cost_more_than_expected_leave_less_for_the_next() -> None:
    # 12 tokens produced, budget 1: 12; the four turns are expected to cost 2 each, 8. Each fork's branches then
    # sample 2 x 3 = 6: 24 are spent. The next group brings 12 more: 24 - 24 = 0, no fork
    found = curation(budget=1.0)
    found.feed(message(two_turns("a", [1.0, 0.0, 0.0, 0.0]), 0))
    assert len(found.forks) == 4
    for number, fork in enumerate(found.forks, 1):
        found.feed(message(branches_of(fork, [1.0, 0.0]), number))
    found.feed(message(two_turns("b", [1.0, 0.0, 0.0, 0.0]), 9))
    assert len(found.forks) == 4
    found.feed(message(two_turns("c", [1.0, 0.0, 0.0, 0.0]), 10))  # 36 - 24 = 12: four more
    assert len(found.forks) == 8


def test_what_cannot_be_replayed_is_not_tried_for_ever() -> None:
    found = curation(budget=0.5)  # 12 tokens give 6: three forks of 2
    for number in range(4):
        found.feed(message(two_turns(number, [1.0, 0.0, 0.0, 0.0]), 10 * number))
        asked = found.forks[3 * number :]
        assert len(asked) == 3
        for fork in asked:
            failed = [t for t in branches_of(fork, [None, None])]
            unsampled = {"action_mask": (False,) * 6, "num_generated_tokens": 0, "num_prompt_tokens": 6, "turns": ()}
            found.feed(message([_changed(t, unsampled) for t in failed], 10 * number + len(found.rows["ledger"])))
    assert found.curator.state.purse.spent == 4 * 6


def _changed(of: Trajectory, cells: dict[str, Any]) -> Trajectory:
    changes: dict[str, Any] = {"group_id": of.group_id, "origin": of.origin, "parent_id": of.parent_id, "reward": None}
    changes |= {"status": "failed", "stop_reason": "error", "error_kind": "environment"}
    return trajectory(("failed", of.group_id), of.group_index, of.group_size, **changes | cells)


@given(
    st.floats(0, 2),
    st.integers(1, 3),
    st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=4), max_size=12),
)
def test_what_is_asked_for_stays_within_the_budget(budget: float, branches: int, rewards: list[list[float]]) -> None:
    found = curation(budget, branches)
    for number, of_group in enumerate(rewards):
        found.feed(message(two_turns(number, list(of_group)), number))
    purse = found.curator.state.purse
    assert purse.produced == 12 * len(rewards)
    assert sum(purse.asked.values()) <= budget * purse.produced
    assert len({f.group_id for f in found.forks}) == len(found.forks) == len(purse.asked)


def test_forks_that_never_come_back_count_as_spent_and_the_state_stays_bounded() -> None:
    purse = Purse()
    for number in range(MAX_ASKED + 5):
        purse.ask(str(number), 3)
    assert (len(purse.asked), purse.spent, purse.left(0.0)) == (MAX_ASKED, 15, -3.0 * (MAX_ASKED + 5))
    purse.settle("0", scored=True)  # long given up
    assert purse.spent == 15
