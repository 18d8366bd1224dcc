"""Agent programs as real processes behind OpenAI's protocol: one row each, their reward, and nothing left running."""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from inference.environments.base import build
from schemas.errors import SettingsError
from schemas.trajectory import Trajectory
from tests.episodes import LIMITS, TOKENIZER, engine, episode, task

pytestmark = pytest.mark.timeout(240)

CALL = '<call>{"name": "look", "arguments": {"what": "a cat"}}</call>'
ASK = """
import json, os, sys, urllib.request
def post(path, body):
    url = os.environ["OPENAI_BASE_URL"] + path
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())))
def ask(*messages):
    said = post("/chat/completions", {"messages": [{"role": "user", "content": m} for m in messages]})
    return said["choices"][0]["message"]["content"]
"""


def _play(code: str, *said: str, limits: dict[str, Any] | None = None, **options: Any) -> Trajectory:
    command = [sys.executable, "-c", ASK + code]
    of = task("external", "agents", 7, command=command, **options)
    return asyncio.run(episode(of, engine(*said), limits=replace(LIMITS, **(limits or {}))))


def test_an_unmodified_agent_of_the_openai_package_is_one_trajectory():
    pytest.importorskip("openai", reason="the package openai is not installed")
    script = str(Path(__file__).parents[1] / "agents" / "openai_agent.py")
    scripted = engine(CALL, "a cat", "bye")
    row = asyncio.run(episode(task("external", "agents", 7, command=[sys.executable, script]), scripted))
    assert (row.status, row.reward, row.rewards, row.error) == ("completed", 0.25, (), None)
    assert [m["role"] for m in row.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert row.messages[1]["content"] == "task 7"
    assert [t.tool for t in row.turns] == ["look", None, None]
    for earlier, later in zip(scripted.prompts, scripted.prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier
    assert list(row.token_ids[: len(scripted.prompts[2])]) == scripted.prompts[2]
    assert TOKENIZER.decode(row.token_ids[row.turns[0].action_start :]).startswith(CALL)


def test_a_reward_that_was_posted_counts_before_what_was_printed():
    row = _play('ask("hello")\npost("/finish", {"reward": 0.75})\nprint(0.5)', "hi")
    assert (row.status, row.reward) == ("completed", 0.75)


def test_a_grader_reads_the_output_and_the_task():
    row = _play('print(ask("hello"))', "hi", grader="tests.verifiers:reads", grade_s=60)
    assert (row.status, row.reward) == ("completed", 27.0)


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ('ask("hello")\nprint("fine")', "verifier", "its last line is none: 'fine'"),
        ('ask("hello")\nprint("nan")', "verifier", "reward of nan"),
        ('ask("hello")\nsys.exit("no sandbox")', "environment", "ended with 1: no sandbox"),
        ("print(1)", "environment", "without a turn of the agent"),
        ('post("/chat/completions", [])', "environment", "400"),
        ('ask("hello")\npost("/finish", {"reward": float("inf")})', "environment", "400"),
    ],
    ids=range(6),
)
def test_programs_that_break_leave_a_row_without_a_reward(code, kind, words):
    row = _play(code, "hi")
    assert (row.status, row.error_kind, row.reward) == ("failed", kind, None)
    assert words in (row.error or "")


def test_a_program_that_asks_too_often_is_truncated():
    row = _play('ask("hello")\nask("hello", "again")\nask("other")', "hi", limits={"max_turns": 2})
    assert (row.status, row.stop_reason, row.reward) == ("truncated", "max_turns", 0.0)


def test_a_program_that_hangs_is_gone_with_its_children_after_the_episode(tmp_path: Path):
    pids = tmp_path / "pids"
    code = f"""
import subprocess, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
ask("hello")
time.sleep(600)
"""
    row = _play(code, "hi", limits={"episode_timeout_s": 5})
    assert (row.status, row.error_kind, len(row.turns)) == ("truncated", "agent_timeout", 1)
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(int(pid)) and _runs(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_programs_get_no_variable_that_is_not_named(monkeypatch):
    monkeypatch.setenv("SOME_SECRET", "1")
    monkeypatch.setenv("NAMED", "0.5")
    code = 'ask("hello")\nassert "SOME_SECRET" not in os.environ\nprint(os.environ["NAMED"])'
    assert _play(code, "hi", pass_variables=["NAMED"]).reward == 0.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": []}, "command"),
        ({"command": ["no-such-program"]}, "no program 'no-such-program'"),
        ({"command": ["sh"], "pass_variables": ["NOT_SET"]}, "NOT_SET"),
        ({"command": ["sh"], "grader": "nothing"}, "grader"),
    ],
)
def test_wrong_options_stop_a_service_at_its_start(options, words):
    with pytest.raises(SettingsError, match=words):
        build("external", "agents", 0, 0, options)
