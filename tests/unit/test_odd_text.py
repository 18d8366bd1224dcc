"""Odd text and numbers, from whoever says them: episodes end as they would, and their rows can be kept.

Text is odd that UTF-8 cannot hold: JSON may escape half of a surrogate pair, so a policy, a tool, a program or a server
can say one.
"""

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from inference.environments.base import ENVIRONMENTS, Environment, Message, Result, Score, Tool, ToolError
from inference.environments.program import Chat, Program
from inference.tools.reply import MAX_REPLY
from schemas.trajectory import TRAJECTORY_SCHEMA, Reward, Trajectory, Turn, from_batch, to_batch
from tests.episodes import engine, episode, task

ODD = "a\ud800b"
SEEN = "a?b"


class Forge(Environment):
    """A tool for each way to say something odd; what is said comes from the agent's arguments."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.tools = {"say": Tool(self._say), "refuse": Tool(self._refuse), "break": Tool(self._break)}

    def reset(self, seed: int) -> list[Message]:
        return [{"role": "user", "content": self.options.get("prompt", "go")}]

    def observe(self, result: Result) -> str:
        return f"{result.text}{self.options.get('observation', '')}"

    async def score(self, answer: str) -> Score:
        if "verifier" in self.options:
            raise ValueError(ODD)
        number = self.options.get("number", 1.0)
        return Score(number, (Reward(self.options.get("part", "all"), number),))

    def turn_reward(self, action: str, results: Sequence[Result]) -> float:
        return self.options.get("number", 0.0)

    async def _say(self, arguments: dict[str, Any]) -> str:
        return arguments["text"]

    async def _refuse(self, arguments: dict[str, Any]) -> str:
        raise ToolError(arguments["text"] * arguments.get("times", 1))

    async def _break(self, arguments: dict[str, Any]) -> str:
        raise ValueError(f"no city {arguments['text']}")


class Led(Program):
    """A program that says something odd in a role, a tool's description and its own error."""

    async def converse(self, chat: Chat) -> str:
        await chat.reply([{"role": ODD, "content": "go"}], [{"function": {"name": "look", "description": ODD}}])
        raise OSError(ODD)

    async def score(self, answer: str) -> Score:
        return Score(1.0)


def build(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    return Led() if family == "led" else Forge(options)


@pytest.fixture(autouse=True)
def forge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "forge", f"{__name__}:build")


def _play(*said: str | Exception, family: str = "forge", **options: Any) -> Trajectory:
    return _kept(asyncio.run(episode(task("forge", family, **options), engine(*said))))


def _kept(row: Trajectory) -> Trajectory:
    """The row as it comes back from Arrow."""
    (kept,) = from_batch(to_batch([row]))
    return kept


def _call(tool: str, **arguments: Any) -> str:
    return f"<call>{json.dumps({'name': tool, 'arguments': {'text': ODD} | arguments})}</call>"


def _observations(row: Trajectory) -> Sequence[str]:
    return [m["content"] for m in row.messages if m["role"] == "tool"]


def test_no_text_keeps_a_trajectory_from_being_encoded() -> None:
    """Every text column, and every text within one."""
    texts = {f.name: ODD for f in TRAJECTORY_SCHEMA if f.type == pa.string() and f.name != "messages"}
    assert len(texts) == 13
    row = dataclasses.replace(
        asyncio.run(episode(task("forge"), engine("42"))),
        **texts,
        turns=(Turn(0, 1, 1, tool=ODD, arguments=ODD, result_status=ODD),),
        rewards=(Reward(ODD, 1.0),),
        messages=({"role": ODD, "content": ODD, ODD: [ODD]},),
    )
    kept = _kept(row)
    assert {name: getattr(kept, name) for name in texts} == dict.fromkeys(texts, SEEN)
    assert kept.turns == (Turn(0, 1, 1, tool=SEEN, arguments=SEEN, result_status=SEEN),)
    assert kept.rewards == (Reward(SEEN, 1.0),)
    assert kept.messages == ({"role": SEEN, "content": SEEN, SEEN: [SEEN]},)


def test_a_tool_that_breaks_over_odd_arguments_leaves_a_row() -> None:
    row = _play(_call("break"), "42")
    assert (row.status, row.error_kind, row.error) == ("failed", "environment", "ValueError: no city a?b")


@pytest.mark.parametrize(("tool", "says"), [("say", SEEN), ("refuse", f"error: {SEEN}")])
def test_the_agent_reads_what_a_tool_says_of_odd_arguments_and_goes_on(tool: str, says: str) -> None:
    row = _play(_call(tool), "42")
    assert (row.status, row.reward, _observations(row)) == ("completed", 1.0, [says])


def test_a_tools_error_is_cut_as_its_reply_is() -> None:
    row = _play(_call("refuse", text="x", times=1_000_000), "42")
    assert (row.status, row.stop_reason) == ("truncated", "context")  # 16,384 characters do not fit in 8,000 tokens
    assert _observations(row) == ["error: " + "x" * (MAX_REPLY - 7) + " ... (cut from 1000007 characters)"]


def test_odd_prompts_observations_and_parts_are_read_and_kept() -> None:
    row = _play(_call("say"), "42", prompt=ODD, observation=ODD, part=ODD)
    assert (row.status, row.rewards) == ("completed", (Reward(SEEN, 1.0),))
    assert [row.messages[0]["content"], *_observations(row)] == [SEEN, SEEN + SEEN]


def test_odd_errors_of_verifiers_and_engines_are_kept() -> None:
    assert _play("42", verifier="breaks").error == f"ValueError: {SEEN}"
    assert _play(OSError(ODD)).error == f"OSError: {SEEN}"


@pytest.mark.parametrize("number", [True, np.bool_(True), np.float16(1), Fraction(1), Decimal(1)], ids=repr)
def test_rewards_may_be_numbers_of_any_kind(number: Any) -> None:
    row = _play("42", number=number)
    assert (row.status, row.reward, row.rewards[0].value, row.turns[0].reward) == ("completed", 1.0, 1.0, 1.0)


@pytest.mark.parametrize("number", [None, "x", 10**400], ids=["None", "x", "huge"])
def test_a_reward_that_is_no_number_is_the_environments_failure(number: Any) -> None:
    row = _play("42", number=number)
    assert (row.status, row.error_kind, row.reward) == ("failed", "environment", None)


def test_an_odd_program_is_answered_and_its_error_kept() -> None:
    row = _play("42", family="led")
    assert (row.error_kind, row.error, len(row.turns)) == ("environment", f"OSError: {SEEN}", 1)
    assert [m["role"] for m in row.messages] == ["system", SEEN, "assistant"]
