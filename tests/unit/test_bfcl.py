"""BFCL: a call is right if its name and arguments are what the problem allows, and nothing else is."""

import asyncio

import pytest

from inference.environments.base import build
from inference.environments.bfcl import SHOWN, problems, solution
from inference.graders.function_call import grade_call, read_call
from schemas.errors import SettingsError

FUNCTION = {
    "name": "shop.buy",
    "parameters": {
        "properties": {
            "item": {"type": "string"},
            "count": {"type": "integer"},
            "price": {"type": "float"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "size": {"type": "dict"},
            "lines": {"type": "array", "items": {"type": "dict"}},
            "gift": {"type": "boolean"},
        },
        "required": ["item", "count"],
    },
}
ALLOWED = {
    "item": ["green tea", "tea"],
    "count": [2],
    "price": ["", 5.0],
    "tags": ["", ["a", "b"]],
    "size": ["", {"w": [1, 2], "unit": ["cm", ""]}],
    "lines": ["", [{"x": [1]}, {"x": [2]}]],
    "gift": ["", True],
}


def test_the_first_allowed_values_of_all_400_problems_earn_1():
    assert len(problems()) == 400
    assert [i for i, p in enumerate(problems()) if grade_call(solution(p), p["function"], p["allowed"]) != 1.0] == []


@pytest.mark.parametrize(
    "text",
    [
        "shop.buy(item='tea', count=2)",
        "[shop.buy(item='tea', count=2)]",
        "```python\nshop.buy(item='Green-Tea', count=2)\n```",
        "shop.buy(count=2, item='tea', price=5)",
        "shop.buy(item='tea', count=2, tags=('A', 'b'), gift=True)",
        "shop.buy(item='tea', count=2, size={'w': 2})",
        "shop.buy(item='tea', count=2, size={'w': 1, 'unit': 'cm'}, lines=[{'x': 1}, {'x': 2}])",
    ],
)
def test_an_allowed_call_earns_1(text):
    assert grade_call(text, FUNCTION, ALLOWED) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "buy(item='tea', count=2)",
        "shop.buy(item='tea')",
        "shop.buy(item='tea', count=2, colour='red')",
        "shop.buy(item='tea', count='2')",
        "shop.buy(item='tea', count=2.0)",
        "shop.buy(item='tea', count=True)",
        "shop.buy(item='coffee', count=2)",
        "shop.buy(item='tea', count=3)",
        "shop.buy('tea', 2)",
        "shop.buy(item='tea', count=2, tags=['b', 'a'])",
        "shop.buy(item='tea', count=2, size={'w': 3})",
        "shop.buy(item='tea', count=2, size={'unit': 'cm'})",
        "shop.buy(item='tea', count=2, lines=[{'x': 1}])",
        "shop.buy(item='tea', count=2, gift=1)",
        "shop.buy(item='tea', count=2); shop.buy(item='tea', count=2)",
        "I call shop.buy(item='tea', count=2)",
        "shop.buy(**{'item': 'tea', 'count': 2})",
        "",
        "(" * 3000,
        "shop.buy(item='tea', count=2" + " " * 5000 + ")",
    ],
    ids=range(20),
)
def test_any_other_text_earns_0(text):
    assert grade_call(text, FUNCTION, ALLOWED) == 0.0


ODD = (
    *("{[1]: 2}", "{{}: 1}", "{[1], 2}", "9" * 400, f"-{'9' * 400}", f"[{'9' * 400}]", "{'w': " + "9" * 400 + "}"),
    *("1e999", "-1e999", "1j", "...", "None", "b'x'", "set()", "{1, 2}", "{(1, [2]): 3}", "{**x}", "[*x]", "f'{x}'"),
    *("lambda: 0", "-'a'", "x[0]", "'a' * 9", "'\\ud800'", "{'x': {'y': [{}]}}", "[[[]]]", "[{}]", "[1, 'a', None]"),
    *("0x" + "f" * 3000, "[" * 90 + "]" * 90, "-" * 3000 + "1", "not " * 900 + "1", "x" + ".a" * 1500),
)


def test_no_value_of_any_parameter_breaks_the_grader():
    """One parameter odd and the others right; a parameter of each type that the 400 problems declare."""
    kinds: dict[tuple[object, ...], tuple[int, str]] = {}
    for number, problem in enumerate(problems()):
        for parameter, values in problem["allowed"].items():
            declared = problem["function"]["parameters"]["properties"][parameter]
            kinds[declared["type"], declared.get("items", {}).get("type"), type(values[-1])] = number, parameter
    assert len(kinds) == 18
    for number, parameter in kinds.values():
        problem = problems()[number]
        call = read_call(solution(problem))
        assert call is not None
        for odd in ODD:
            arguments = {p: repr(v) for p, v in call[1].items()} | {parameter: odd}
            text = f"{call[0]}({', '.join(f'{p}={v}' for p, v in arguments.items())})"
            assert grade_call(text, problem["function"], problem["allowed"]) == 0.0, text


def test_an_integer_for_a_float_is_compared_exactly_whatever_its_size():
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "float"}}, "required": ["a"]}}
    calls = ("f(a=5)", "f(a=5.0)", f"f(a={10**400})", "f(a=6)")
    assert [grade_call(text, function, {"a": [5.0]}) for text in calls] == [1.0, 1.0, 0.0, 0.0]


def test_a_parameter_that_is_allowed_no_empty_value_must_be_given():
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}, "required": []}}
    assert [grade_call(t, function, {"a": [1]}) for t in ("f(a=1)", "f()")] == [1.0, 0.0]


def test_a_name_counts_as_its_text_and_is_never_evaluated():
    assert read_call("f(a=x.y, b=__import__('os').getcwd())") == ("f", {"a": "x.y", "b": "__import__('os').getcwd()"})


def test_the_prompt_solves_three_problems_that_are_no_tasks():
    environment = build("bfcl", "bfcl", 100, 0, {})
    messages = environment.reset(0)
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 3, "user"]
    assert messages[2]["content"] == solution(problems()[100])
    assert problems()[103]["question"] in messages[-1]["content"]
    right = asyncio.run(environment.score(solution(problems()[103])))
    wrong = asyncio.run(environment.score(messages[2]["content"]))
    assert [(s.reward, s.parts[0].value) for s in (right, wrong)] == [(1.0, 1.0), (0.0, 1.0)]


def test_there_are_397_tasks_and_no_options():
    build("bfcl", "bfcl", 396, 0, {})
    assert len(SHOWN) == 3
    with pytest.raises(SettingsError, match="has 397 tasks"):
        build("bfcl", "bfcl", 397, 0, {})
    with pytest.raises(SettingsError, match="takes none"):
        build("bfcl", "bfcl", 0, 0, {"category": "java"})


def test_missing_data_name_the_way_to_install_them(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"make setup.*requirements-data\.txt"):
        problems.__wrapped__()
