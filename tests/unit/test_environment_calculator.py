"""The calculator: tasks by number, one operation a call, and a tool that can fail, hang and break."""

import asyncio
import random
import subprocess
import sys

import pytest

from inference.environments.base import ToolError, build
from inference.environments.calculator import Calculator, calculate, options_of, solved
from inference.environments.calls import Call, Malformed
from inference.environments.questions import KINDS, Question, question
from inference.tools import Toolbox
from schemas.errors import SettingsError
from schemas.names import ResultStatus


def _environment(family: str, index: int = 0, **options) -> Calculator:
    environment = build("calculator", family, index, 0, options)
    assert isinstance(environment, Calculator)
    return environment


def _call(expression: str) -> Call:
    return Call("calculator", {"expression": expression}, expression)


def _statuses(environment: Calculator, number: int, timeout_s: float = 5) -> list[ResultStatus]:
    async def ask() -> list[ResultStatus]:
        results = [(await Toolbox().run(environment, [_call("1+1")], timeout_s))[0] for _ in range(number)]
        return [r.status for r in results]

    return asyncio.run(ask())


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_tasks_of_a_family_ask_the_same_question(kind):
    texts = [question(kind, kind, i, seed=0).text for i in range(200)]
    assert len(set(texts)) == 200


def test_a_task_does_not_depend_on_which_were_built_before_it():
    alone = "from inference.environments.questions import question; print(question('chain', 'chain', 150, 7).text)"
    other = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, check=True)
    for index in range(10):
        question("chain", "chain", index, 7)
    assert question("chain", "chain", 150, 7).text == other.stdout.strip()


def test_more_tasks_than_a_kind_has_questions_are_refused_by_name():
    with pytest.raises(SettingsError, match="family small: kind muladd has 512 questions"):  # 8 * 8 * 8
        question("muladd", "small", 512, 0)


@pytest.mark.parametrize(
    ("expression", "value"), [("75+65", "140"), ("140-59", "81"), ("9-10", "-1"), ("7*3", "21"), ("007+1", "8")]
)
def test_one_operation_on_non_negative_integers_has_a_value(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["", "1+2+3", "-1+2", "1+", "1/2", "12345+1", "1 + 2", "\uff11+2", "1+2\n"])
def test_anything_else_is_refused(expression):
    with pytest.raises(ToolError):
        calculate(expression)


def test_following_the_plan_earns_the_reward():
    environment = _environment("chain", 3)
    observation = "R"
    for planned in environment.task.plan:
        calls = environment.parse(f"<call>{planned.replace('R', observation)}</call>")
        observation = environment.observe(asyncio.run(Toolbox().run(environment, calls, 1))[0])
    assert asyncio.run(environment.score(observation)).reward == 1.0
    assert asyncio.run(environment.score(observation + "0")).reward == 0.0


@pytest.mark.parametrize(
    "action", ["<call>1+1", "1+1</call>", "<call>1+1</call> so 2", "call>", "<call><call>1+1</call>"]
)
def test_any_other_trace_of_a_call_tag_is_malformed_never_an_answer(action):
    (call,) = _environment("add").parse(action)
    assert isinstance(call, Malformed)


def test_text_without_a_call_tag_is_the_answer():
    assert _environment("add").parse("42") == ()


def test_the_secret_is_in_no_question():
    tasks = [question("secret", "secret", i, 0) for i in range(200)]
    assert not [t for t in tasks if t.answer in t.text]


def test_flaky_calls_fail_half_of_the_time_and_sums_do_not():
    refused = _statuses(_environment("flaky"), 400).count(ResultStatus.ERROR)
    assert 150 < refused < 250  # 200 expected, five standard deviations are 50
    assert set(_statuses(_environment("add"), 100)) == {ResultStatus.OK}


def test_a_hanging_tool_is_ended_by_its_limit():
    assert _statuses(_environment("add", hang_rate=1.0), 1, timeout_s=0.05) == [ResultStatus.TIMEOUT]


def test_a_broken_environment_raises_what_no_agent_can_be_blamed_for():
    environment = _environment("add", crash_rate=1.0)
    with pytest.raises(RuntimeError):
        _statuses(environment, 1)
    with pytest.raises(RuntimeError):
        asyncio.run(environment.score("1"))


def test_the_episode_seed_decides_what_the_tool_does():
    def statuses(seed: int) -> list[ResultStatus]:
        environment = _environment("flaky")
        environment.reset(seed)
        return _statuses(environment, 20)

    assert statuses(1) == statuses(1)
    assert statuses(1) != statuses(2)


def test_process_reward_is_for_calls_that_can_be_read_and_answers_that_are_numbers():
    environment = _environment("add")

    def reward(action: str) -> float:
        results = asyncio.run(Toolbox().run(environment, environment.parse(action), 1))
        return environment.turn_reward(action, results)

    assert [reward(a) for a in ("<call>1+1</call>", "<call>1+1+1</call>", "<call>1", "12", "twelve")] == [1, 0, 0, 1, 0]


@pytest.mark.parametrize("options", [{"kind": "sum"}, {"fail_rate": 1.5}, {"noise": 1}])
def test_wrong_options_are_refused_with_the_family_named(options):
    with pytest.raises(SettingsError, match="family add"):
        options_of("add", options)


@pytest.mark.parametrize("name", ["chess", "no_such_module:build", "inference.tools:nothing"])
def test_an_unknown_environment_is_refused_by_name(name):
    with pytest.raises(SettingsError, match=name):
        build(name, "f", 0, 0, {})


def test_slow_calls_are_log_normal_cut_at_their_most_and_within_the_limit_of_the_tool():
    """Median 0.1, sigma 1: half are longer, and the share above 0.4 is that of a normal above ln 4 = 1.386: 8.3 %."""
    options = options_of("add", {"tool_seconds": {"median": 0.1, "sigma": 1.0, "most": 0.4}})
    assert options.tool_seconds is not None
    rng = random.Random(0)
    drawn = [options.tool_seconds.draw(rng) for _ in range(10_000)]
    assert sum(d > 0.1 for d in drawn) / 10_000 == pytest.approx(0.5, abs=0.02)
    assert sum(d == 0.4 for d in drawn) / 10_000 == pytest.approx(0.083, abs=0.01)
    assert max(drawn) == 0.4
    slow = _environment("add", tool_seconds={"median": 0.05, "sigma": 0, "most": 0.05})
    assert _statuses(slow, 1, timeout_s=0.01) == [ResultStatus.OK]
    with pytest.raises(SettingsError, match=r"tool_seconds\.median"):
        options_of("add", {"tool_seconds": {"median": 0, "most": 1}})


def test_a_prompt_shows_solved_questions_with_their_calls_and_never_the_one_to_solve():
    prompt, own = _environment("add", shots=2).reset(0), _environment("add").task.text
    assert [m["role"] for m in prompt] == ["user", "assistant", "tool", "assistant"] * 2 + ["user"]
    assert prompt[-1]["content"] == own
    for begin in (0, 4):
        asked, call, value, answer = (m["content"] for m in prompt[begin : begin + 4])
        expression = asked.removeprefix("compute ")
        assert asked != own
        assert call == f"<call>{expression}</call>"
        assert value == answer == calculate(expression)
    chained = solved(Question("compute 10+20-5", "25", ("10+20", "R-5")))
    assert [m["content"] for m in chained][1:] == ["<call>10+20</call>", "30", "<call>30-5</call>", "25", "25"]
    assert [m["role"] for m in _environment("larger", shots=3).reset(0)] == ["user", "assistant"] * 3 + ["user"]
