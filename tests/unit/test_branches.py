"""Branches: episodes that leave a recorded one at a turn, in which everything else is as it was."""

import asyncio
import json

import pytest

from inference.agent import Limits, play
from inference.tokenizer import ChatTokenizer, make_tokenizer
from inference.tools import Toolbox
from schemas.errors import ContractError
from schemas.messages import Branch, Task, decode
from schemas.names import ErrorKind, Origin
from schemas.trajectory import Trajectory
from tests.road import NAME, TURNS, Coin, branch_of
from tests.rollout_fakes import task

TOKENIZER = ChatTokenizer(make_tokenizer([""]).to_str())
LIMITS = Limits(
    max_turns=8, max_turn_tokens=200, max_tokens=4000, temperature=1.0, tool_timeout_s=10, episode_timeout_s=60
)
DECISIVE = 2
NUM_BRANCHES = 8


def played(of: Task, index: int = 0) -> Trajectory:
    return asyncio.run(
        play(
            of,
            index,
            engine=Coin(TOKENIZER),  # pyright: ignore[reportArgumentType]
            tokenizer=TOKENIZER,
            toolbox=Toolbox(),
            limits=LIMITS,
            producer="rollout-0",
        )
    )


def parent_of(index: int = 0) -> Trajectory:
    return played(task(environment=NAME, options={"decisive": DECISIVE}), index)


def branches(branch: Branch, environment: str = NAME, count: int = NUM_BRANCHES) -> list[Trajectory]:
    of = task(1, environment=environment, options={"decisive": DECISIVE}, branch=branch, origin=Origin.COUNTERFACTUAL)
    return [played(of, i) for i in range(count)]


def ways(trajectory: Trajectory) -> list[str]:
    """The ways that were gone, of branches those of the parent before it included."""
    said = [m["content"] for m in trajectory.messages if m["role"] == "assistant"]
    return [json.loads(text[6:-7])["arguments"]["way"] for text in said if text.startswith("<call>")]


def test_a_branch_is_its_parent_but_for_one_turn_and_what_follows_from_it() -> None:
    parent = parent_of()
    for turn in range(TURNS):
        found = branches(branch_of(parent, turn))
        for one in found:
            assert (one.parent_id, one.origin, one.status) == (parent.trajectory_id, "counterfactual", "completed")
            assert one.token_ids[: one.num_prompt_tokens] == parent.token_ids[: parent.turns[turn].action_start]
            assert len(one.turns) == TURNS + 1 - turn
            assert (
                sum(one.action_mask)
                == one.num_generated_tokens
                == sum(t.action_end - t.action_start for t in one.turns)
            )
            others = [k for k in range(TURNS) if k != turn]
            assert [ways(one)[k] for k in others] == [ways(parent)[k] for k in others]
        assert {ways(one)[turn] for one in found} == {"left", "right"}


def test_only_the_decisive_turn_has_branches_that_end_otherwise() -> None:
    for index in range(4):
        parent = parent_of(index)
        for turn in range(TURNS):
            rewards = {one.reward for one in branches(branch_of(parent, turn))}
            assert rewards == ({0.0, 1.0} if turn == DECISIVE else {parent.reward})


def test_a_tool_that_declares_alternatives_has_each_tried_in_place_of_the_turn() -> None:
    declares = {"decisive": DECISIVE, "declares": True}
    parent = played(task(environment=NAME, options=declares))
    for turn in range(TURNS):
        of = task(1, environment=NAME, options=declares, branch=branch_of(parent, turn), origin=Origin.COUNTERFACTUAL)
        found = [played(of, index) for index in range(4)]
        assert [ways(one)[turn] for one in found] == ["left", "right", "left", "right"]
        for one in found:
            assert [ways(one)[k] for k in range(TURNS) if k != turn] == [
                ways(parent)[k] for k in range(TURNS) if k != turn
            ]
            assert len(one.turns) == TURNS - turn  # nothing that was declared is trained on
            assert sum(one.action_mask) == sum(t.action_end - t.action_start for t in one.turns)
            assert not any(one.action_mask[: one.num_prompt_tokens])
            assert TOKENIZER.decode(one.token_ids[: one.num_prompt_tokens]).count("</call>") == turn + 1
        if turn == DECISIVE:
            assert [one.reward for one in found] == [1.0, 0.0, 1.0, 0.0]
    last = branches(branch_of(parent, TURNS), count=2)  # an answer calls nothing, and is sampled anew
    assert [len(one.turns) for one in last] == [1, 1]


def test_a_replay_that_reads_something_else_is_a_failure_of_the_environment_that_keeps_its_prompt() -> None:
    whole = branch_of(parent_of(), 2)
    seen = whole.actions[0][1] + 5  # in what was read after the first turn
    other = (*whole.token_ids[:seen], whole.token_ids[seen] + 1, *whole.token_ids[seen + 1 :])
    changed = whole.model_copy(update={"token_ids": other})
    (one,) = branches(changed, count=1)
    assert (one.reward, one.error_kind, one.token_ids) == (None, ErrorKind.ENVIRONMENT, other)
    assert one.error is not None
    assert "differs before turn 2" in one.error
    (unlike,) = branches(whole.model_copy(update={"group_index": 3}), count=1)  # another seed
    assert "differs before turn" in (unlike.error or "")


def test_an_environment_that_leads_the_conversation_cannot_be_branched() -> None:
    of = task(1, environment="external", options={"command": ["true"]}, branch=branch_of(parent_of(), 1))
    one = played(of)
    assert (one.reward, one.error_kind) == (None, ErrorKind.ENVIRONMENT)
    assert "cannot be replayed" in (one.error or "")


@pytest.mark.parametrize("actions", [[[0, 2]], [[3, 3]], [[2, 5], [4, 6]], [[2, 9]], [[5, 2]]])
def test_a_branch_whose_actions_do_not_fit_its_tokens_is_refused(actions: list[list[int]]) -> None:
    sound = {"parent_id": "p", "group_id": "g", "group_index": 0, "attempt": 1, "token_ids": [7] * 8}
    assert decode(Branch, json.dumps(sound | {"actions": [[2, 4], [5, 8]]}).encode()).turn == 2
    with pytest.raises(ContractError, match="do not follow one another"):
        decode(Branch, json.dumps(sound | {"actions": actions}).encode())
