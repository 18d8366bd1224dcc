"""Programs that lead the conversation: however they send their history, an episode is one row of sampled tokens."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from inference.conversation import as_message
from inference.engines.base import EngineError
from inference.environments.base import ENVIRONMENTS, Score
from inference.environments.program import Chat, Program, Refused
from inference.tokenizer import END, START
from schemas.trajectory import Trajectory
from tests.episodes import LIMITS, TOKENIZER, engine, episode, line, task
from tests.policies import ScriptedEngine

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = 'I look. <call>{"name": "look", "arguments": {"what": "cat"}}</call>'

OPENING = len(TOKENIZER.prompt([{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]))

Lead = Callable[[Chat], Awaitable[str]]


class Led(Program):
    """Does what the test's function does; its answer is the reward."""

    def __init__(self, lead: Lead):
        self.lead = lead

    async def converse(self, chat: Chat) -> str:
        return await self.lead(chat)

    async def score(self, answer: str) -> Score:
        return Score(float(answer))


LEADS: list[Lead] = []


def build_led(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Led:
    return Led(LEADS[-1])


@pytest.fixture(autouse=True)
def led(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "led", f"{__name__}:build_led")


def _play(lead: Lead, engine: ScriptedEngine, **limits: Any) -> Trajectory:
    LEADS.append(lead)
    return asyncio.run(episode(task("led"), engine, limits=replace(LIMITS, **limits)))


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def _three_turns(chat: Chat) -> str:
    history = [{"role": "system", "content": "be brief"}, _user("one")]
    for text in ("two", "three"):
        history += [as_message(await chat.reply(history)), _user(text)]
    await chat.reply(history)
    return "0.5"


def test_eight_multi_turn_episodes_that_send_their_history_again_are_eight_rows():
    """THUDM/slime#2288: they became 64 samples."""

    async def group() -> list[Trajectory]:
        LEADS.append(_three_turns)
        return await asyncio.gather(*(episode(task("led"), engine("a", "b", "c"), i) for i in range(8)))

    rows = asyncio.run(group())
    assert sorted(row.group_index for row in rows) == list(range(8))
    for row in rows:
        assert (row.status, row.reward, row.rewards, len(row.turns)) == ("completed", 0.5, (), 3)
        assert TOKENIZER.decode(row.token_ids) == (
            f"{START}system\nbe brief{END}\n{START}user\none{END}\n{START}assistant\na{END}\n"
            f"{START}user\ntwo{END}\n{START}assistant\nb{END}\n{START}user\nthree{END}\n{START}assistant\nc{END}"
        )
        assert row.num_generated_tokens == sum(row.action_mask) == 6
        assert {p for p, m in zip(row.behavior_logprobs, row.action_mask, strict=True) if m} == {-0.5}
        first, second, last = row.turns
        assert (first.observation_end, second.observation_end) == (second.action_start, last.action_start)


def test_sampled_ids_stay_where_the_tokenizer_would_have_chosen_others():
    pieces = TOKENIZER.encode("comp") + TOKENIZER.encode("ute")
    assert pieces != TOKENIZER.encode("compute")
    sampled = [*pieces, TOKENIZER.end_id]
    scripted = ScriptedEngine([sampled, line("b"), line("c")], TOKENIZER.end_id)
    row = _play(_three_turns, scripted)
    start = row.num_prompt_tokens
    assert row.token_ids[start : start + len(sampled)] == tuple(sampled)
    assert scripted.prompts[1][: start + len(sampled)] == scripted.prompts[0] + sampled
    assert row.token_ids[: len(scripted.prompts[2])] == tuple(scripted.prompts[2])


def test_a_request_sent_again_gets_the_same_reply_and_is_sampled_once():
    async def lead(chat: Chat) -> str:
        replies = await asyncio.gather(*(chat.reply([_user("one")]) for _ in range(3)))
        assert replies[0] == replies[1] == replies[2]
        return "1"

    scripted = engine("a", "b")
    assert len(_play(lead, scripted).turns) == len(scripted.prompts) == 1


@pytest.mark.parametrize("change", ["other words", "shorter", "other tools", "nothing new"])
def test_another_history_is_answered_aside_and_counted(change):
    async def lead(chat: Chat) -> str:
        first = [_user("one")]
        history = [*first, as_message(await chat.reply(first)), _user("two")]
        rewritten = {
            "other words": ([_user("uno"), *history[1:]], ()),
            "shorter": (history[2:], ()),
            "other tools": (history, TOOLS),
            "nothing new": (history[:2], ()),
        }
        assert (await chat.reply(*rewritten[change])).text == "a"  # a session of its own, so its script begins anew
        assert (await chat.reply(history)).text == "b"
        return "1"

    scripted = engine("a", "b")
    row = _play(lead, scripted)
    assert [(p.name, p.value) for p in row.rewards] == [("asides", 1.0)]
    assert [t.action_end - t.action_start for t in row.turns] == [2, 2]
    assert row.token_ids[: len(scripted.prompts[2])] == tuple(scripted.prompts[2])
    assert len(scripted.released) == 2


def test_blanks_and_form_of_a_history_may_change_in_passing():
    async def lead(chat: Chat) -> str:
        await chat.reply([{"role": "developer", "content": "be brief"}, _user("one")])
        parts = [{"type": "text", "text": "one"}]
        said = {"role": "assistant", "content": "a"}
        await chat.reply(
            [{"role": "system", "content": "be brief\n"}, {**_user(""), "content": parts}, said, _user("2")]
        )
        return "1"

    row = _play(lead, engine(" a\n", "b"))
    assert (row.rewards, len(row.turns)) == ((), 2)


def test_calls_are_read_where_tools_are_offered_and_their_results_go_on():
    async def lead(chat: Chat) -> str:
        reply = await chat.reply([_user("one")], TOOLS)
        assert (reply.text, [(c.tool, c.arguments) for c in reply.calls]) == ("I look.", [("look", {"what": "cat"})])
        message = as_message(reply)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a cat"}
        await chat.reply([_user("one"), message, result], TOOLS)
        return "1"

    row = _play(lead, engine(CALL, "done"))
    assert [(t.tool, t.result_status) for t in row.turns] == [("look", "ok"), (None, "none")]
    assert '{"name": "look", "parameters": {}}' in row.messages[0]["content"]
    assert TOKENIZER.decode(row.token_ids).endswith(f"{END}\n{START}tool\na cat{END}\n{START}assistant\ndone{END}")


@pytest.mark.parametrize(("said", "tools"), [(CALL, ()), ("<call>{</call>", TOOLS)])
def test_what_is_no_call_reaches_the_program_as_text(said, tools):
    async def lead(chat: Chat) -> str:
        reply = await chat.reply([_user("one")], tools)
        assert (reply.text, reply.calls) == (said, ())
        return "0"

    row = _play(lead, engine(said))
    assert (row.status, row.reward) == ("completed", 0.0)
    assert row.error_kind == ("malformed_call" if tools else None)


@pytest.mark.parametrize("heeds", [True, False])
@pytest.mark.parametrize(
    ("limits", "reason"), [({"max_turns": 1}, "max_turns"), ({"max_tokens": OPENING + 4}, "context")]
)
def test_limits_truncate_whatever_the_program_makes_of_it(limits, reason, heeds):
    async def lead(chat: Chat) -> str:
        try:
            return await _three_turns(chat)
        except Refused:
            if heeds:
                raise
            return "1"

    row = _play(lead, engine("a", "b", "c"), **limits)
    assert (row.status, row.stop_reason, row.reward, len(row.turns)) == ("truncated", reason, 0.0, 1)


def test_an_opening_that_does_not_fit_is_nobodys_zero():
    row = _play(_three_turns, engine("a"), max_tokens=OPENING)
    assert (row.status, row.error_kind, row.reward) == ("failed", "environment", None)
    assert "without a turn of the agent (context)" in (row.error or "")


def test_a_turn_that_a_limit_cut_off_can_be_followed():
    row = _play(_three_turns, ScriptedEngine([line("a")[:-1], line("b"), line("c")], TOKENIZER.end_id))
    assert f"assistant\na{END}\n{START}user\ntwo" in TOKENIZER.decode(row.token_ids)
    assert (row.status, row.num_generated_tokens) == ("completed", 5)


def test_a_lost_engine_is_the_engines_failure_though_the_program_carries_on():
    async def lead(chat: Chat) -> str:
        for _ in range(3):
            with pytest.raises(Refused, match="gone"):
                await chat.reply([_user("one")])
        return "1"

    row = _play(lead, engine(EngineError("gone")))
    assert (row.status, row.error_kind, row.reward) == ("failed", "engine", None)


@pytest.mark.parametrize(("answer", "kind"), [("asks nothing", "environment"), ("not a number", "verifier")])
def test_failures_of_programs_earn_nobody_a_zero(answer, kind):
    async def lead(chat: Chat) -> str:
        if answer == "not a number":
            await chat.reply([_user("one")])
        return answer

    row = _play(lead, engine("a"))
    assert (row.status, row.error_kind, row.reward) == ("failed", kind, None)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": 3},
        {"content": "one"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "[" * 100_000}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": None}}]},
    ],
    ids=["image", "number", "no role", "nested", "no arguments"],
)
def test_what_is_no_message_of_text_is_refused(message):
    async def lead(chat: Chat) -> str:
        with pytest.raises(Refused, match="not a message of text"):
            await chat.reply([message])
        await chat.reply([_user("one")])
        return "1"

    assert _play(lead, engine("a")).reward == 1.0


def test_characters_that_are_no_text_are_replaced():
    async def lead(chat: Chat) -> str:
        await chat.reply([_user("a\0b\ud800c")])
        return "1"

    assert _play(lead, engine("a")).messages[0]["content"] == "a\ufffdb?c"
