"""The environment that docs/environments.md writes out: it is short, and it plays."""

import asyncio
import re
import sys
import tomllib
import types
from pathlib import Path

import pytest

from inference.environments.base import ENVIRONMENTS, Environment, build, try_families
from schemas.names import Origin
from schemas.settings import Family
from tests.episodes import engine, episode, task
from tests.road import branch_of

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
SECTION = PAGE.partition("## Writing one's own")[2]
CODE, TOML = (re.search(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)[1] for language in ("python", "toml"))  # pyright: ignore
NAME = "my_games.guess:build"


@pytest.fixture(autouse=True)
def my_games(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_games.guess")
    exec(CODE, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_games", types.ModuleType("my_games"))
    monkeypatch.setitem(sys.modules, "my_games.guess", module)


def _made(index: int = 0, seed: int = 0, hints: int = 7) -> Environment:
    return build(NAME, "guess", index, seed, {"hints": hints})


def _call(guess: object) -> str:
    return f'<call>{{"name": "compare", "arguments": {{"guess": {guess}}}}}</call>'


def test_it_is_under_40_lines():
    assert len(CODE.splitlines()) < 40


def test_its_family_starts_and_draws_by_weight():
    (family,) = (Family.model_validate(f) for f in tomllib.loads(TOML)["families"])
    try_families([family], 0)
    assert (family.environment, family.num_train, family.weight, family.options) == (NAME, 400, 2.0, {"hints": 5})


def test_every_family_of_the_page_names_an_environment_that_there_is():
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    families = [Family.model_validate(f) for block in blocks for f in tomllib.loads(block)["families"]]
    assert {f.environment for f in families} <= {*ENVIRONMENTS, NAME}
    assert len(families) >= 6


def test_an_episode_finds_the_number_by_its_tool():
    number = _made().number
    said = (_call('"x"'), _call(number - 1), _call(number), f" {number}\n")
    row = asyncio.run(episode(task(NAME, "guess", hints=2), engine(*said)))
    assert (row.status, row.reward) == ("completed", 1.0)
    assert [t.result_status for t in row.turns] == ["error", "ok", "ok", "none"]
    assert row.messages[-2]["content"] == "yes"
    wrong = asyncio.run(episode(task(NAME, "guess"), engine(str(number + 1))))
    assert (wrong.status, wrong.reward) == ("completed", 0.0)


def test_a_task_depends_on_index_and_seed_and_its_hints_on_the_episodes_seed():
    assert _made(3, 5).number == _made(3, 5).number
    assert len({_made(i, s).number for i in range(10) for s in range(3)}) > 5

    async def hints(seed: int) -> list[str]:
        environment = _made(hints=20)
        environment.reset(seed)
        return [await environment.compare({"guess": 0}) for _ in range(20)]

    assert asyncio.run(hints(1)) == asyncio.run(hints(1)) != asyncio.run(hints(2))


def test_a_branch_of_it_has_the_hints_left_and_the_words_to_come_that_its_parent_had_at_the_turn():
    of, call = task(NAME, "guess", hints=4), _call(0)
    parent = asyncio.run(episode(of, engine(*[call] * 4, "0")))
    words = [m["content"] for m in parent.messages if m["role"] == "tool"]
    assert set(words) == {"higher", "more"}
    changes = {"group_id": "branches", "origin": Origin.COUNTERFACTUAL, "branch": branch_of(parent, 1)}
    branch = asyncio.run(episode(of.model_copy(update=changes), engine(*[call] * 4, "0")))
    assert [t.result_status for t in branch.turns] == ["ok"] * 3 + ["error", "none"]
    assert [m["content"] for m in branch.messages if m["role"] == "tool"] == [*words, "error: no hints left"]
