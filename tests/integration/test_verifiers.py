"""Environments of the real package `verifiers`, unchanged: their turns, tools and rewards; our tokens."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from inference.environments.base import build
from schemas.errors import SettingsError
from schemas.trajectory import Trajectory
from tests.episodes import TOKENIZER, engine, episode, task
from tests.policies import ScriptedEngine

pytest.importorskip("verifiers", reason="the package verifiers is not installed")
pytestmark = pytest.mark.timeout(240)

TASKSETS = str(Path(__file__).parents[1] / "tasksets")
LETTERS = {"taskset": {"id": "vf-letters"}}


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(TASKSETS)
    paths = [TASKSETS, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))  # for the processes that serve tools


def _play(env: dict[str, Any], scripted: ScriptedEngine, index: int = 0, **options: str) -> Trajectory:
    options = {"env": env} if env else options
    row = asyncio.run(episode(task("verifiers", "family", index, **options), scripted))
    for earlier, later in zip(scripted.prompts, scripted.prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier
    if scripted.prompts:
        assert list(row.token_ids[: len(scripted.prompts[-1])]) == scripted.prompts[-1]
    return row


def _parts(row: Trajectory) -> dict[str, float]:
    return {part.name: part.value for part in row.rewards}


def test_a_single_turn_earns_the_weighted_sum_and_its_parts():
    row = _play(LETTERS, engine("ekal"))
    assert (row.status, row.reward, row.error) == ("completed", 1.5, None)
    assert _parts(row) == {"exact": 1.0, "short": 1.0, "length": 4.0}
    assert [(m["role"], m["content"]) for m in row.messages] == [
        ("system", "Be brief."),
        ("user", "Spell lake backwards."),
        ("assistant", "ekal"),
    ]
    wrong = _play(LETTERS, engine("boats"), index=1)
    assert (wrong.reward, _parts(wrong)["exact"]) == (0.0, 0.0)


def test_an_environment_that_answers_as_the_user_is_one_trajectory_of_several_turns():
    row = _play({"taskset": {"id": "vf-guess"}}, engine("50", "20", "42"), index=1)
    assert (row.status, row.error, len(row.turns)) == ("completed", None, 3)
    assert row.reward == pytest.approx(1 / 3)
    assert [m["content"] for m in row.messages] == ["Guess my number.", "50", "lower", "20", "higher", "42"]
    assert row.num_generated_tokens == sum(row.action_mask) == sum(t.action_end - t.action_start for t in row.turns)


@pytest.mark.slow
def test_tools_of_the_environment_are_called_and_an_unknown_one_is_an_observation():
    unknown = '<call>{"name": "x", "arguments": {}}</call>'
    call = '<call>{"name": "atlas_toolset_depth", "arguments": {"lake": "Como"}}</call>'
    row = _play({"taskset": {"id": "vf-lookup"}}, engine(unknown, call, "425"))
    assert (row.status, row.reward, row.error) == ("completed", 1.0, None)
    assert [m["content"] for m in row.messages if m["role"] == "tool"] == [
        "error: no tool 'x'; there is atlas_toolset_depth",
        "425",
    ]
    assert [t.tool for t in row.turns] == ["x", "atlas_toolset_depth", None]


def test_scoring_that_breaks_is_the_verifiers_failure():
    row = _play(LETTERS, engine("cba"), index=2)
    assert (row.status, row.error_kind, row.reward) == ("failed", "verifier", None)
    assert "no reference for this one" in (row.error or "")


def test_an_environment_that_breaks_is_no_fault_of_the_agents():
    row = _play({"taskset": {"id": "vf-guess"}}, engine("fifty"))
    assert (row.status, row.error_kind, row.reward) == ("failed", "environment", None)
    assert "fifty" in (row.error or "")


@pytest.mark.parametrize("load", ["", "vf_letters:one_word"])
def test_an_environment_is_described_in_the_options_or_made_by_a_function(load):
    env = {} if load else {"taskset": {"id": "vf-letters", "words": ["sea"]}}
    row = _play(env, engine("aes"), load=load)
    assert (row.reward, row.messages[1]["content"]) == (1.5, "Spell sea backwards.")
    assert TOKENIZER.decode(row.token_ids).count("Spell") == 1


def test_a_harness_that_the_task_set_ships_plays_it():
    row = _play({"taskset": {"id": "vf-shouted"}}, engine("ekal"))
    assert (row.reward, row.messages[1]["content"]) == (1.5, "SPELL LAKE BACKWARDS.")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"env": {"taskset": {"id": "no-such-tasks"}}}, "no-such-tasks"),
        ({"env": {"taskset": {"id": "vf-letters", "verbs": []}}}, "verbs"),
        ({}, "either env or load"),
        ({"load": "nowhere"}, "load"),
    ],
)
def test_what_cannot_be_loaded_stops_a_service_at_its_start(options, words):
    with pytest.raises(SettingsError, match=words):
        build("verifiers", "family", 0, 0, options)


def test_there_are_no_more_tasks_than_the_task_set_has():
    build("verifiers", "family", 2, 0, {"env": LETTERS})
    with pytest.raises(SettingsError, match="no task 3; lower its num_tasks"):
        build("verifiers", "family", 3, 0, {"env": LETTERS})


def test_a_task_that_the_task_set_repeats_is_left_out():
    """Or one of the two could be held out, and the other trained on."""
    options = {"env": {"taskset": {"id": "vf-letters", "words": ["lake", "lake", "boats", "lake"]}}}
    tasks = [build("verifiers", "family", i, 0, options) for i in range(2)]
    assert [task.task.data.answer for task in tasks] == ["ekal", "staob"]
    with pytest.raises(SettingsError, match="no task 2"):
        build("verifiers", "family", 2, 0, options)
