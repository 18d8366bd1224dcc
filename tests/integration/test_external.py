"""Agent programs as real processes behind OpenAI's protocol: one row each, their reward, and nothing left running."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
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
FAMILY = """
import subprocess
nap = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(nap).pid
apart = subprocess.Popen(nap, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid
leave = f"import subprocess; print(subprocess.Popen({nap}, start_new_session=True, stdout=subprocess.DEVNULL).pid)"
orphan = subprocess.check_output([sys.executable, "-c", leave], text=True).strip()
with open(PIDS + ".new", "w") as file:
    file.write(f"{os.getpid()} {child} {apart} {orphan}")
os.rename(PIDS + ".new", PIDS)
"""
"""A child, one in a session of its own, and one that has lost its parent too."""


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


def test_a_program_that_hangs_is_gone_with_all_that_it_started_after_the_episode(tmp_path: Path):
    code = f'PIDS = {str(tmp_path / "pids")!r}\nask("hello")\n{FAMILY}\nimport time\ntime.sleep(600)'
    row = _play(code, "hi", limits={"episode_timeout_s": 5})
    assert (row.status, row.error_kind, len(row.turns)) == ("truncated", "agent_timeout", 1)
    assert _running(tmp_path / "pids") == []


def test_what_a_program_leaves_running_ends_with_it(tmp_path: Path):
    row = _play(f'PIDS = {str(tmp_path / "pids")!r}\n{FAMILY}\nask("hello")\nprint(0.5)', "hi")
    assert (row.status, row.reward) == ("completed", 0.5)
    assert _running(tmp_path / "pids") == []


@pytest.mark.parametrize(
    ("does", "reward"),
    [
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(0, signal.SIGTERM)", 0.5),
        ("os.kill(os.getppid(), signal.SIGTERM)", 0.5),
        ("os.kill(os.getppid(), signal.SIGSTOP)", 0.0),
    ],
)
def test_a_program_ends_with_all_that_it_started_whatever_it_signals(tmp_path: Path, does: str, reward: float):
    code = f'PIDS = {str(tmp_path / "pids")!r}\n{FAMILY}\nask("hello")\nimport signal\n{does}\nprint(0.5, flush=True)'
    row = _play(code, "hi", limits={"episode_timeout_s": 5})
    assert row.reward == reward
    assert _running(tmp_path / "pids") == []


def test_a_killed_service_takes_its_programs_along(tmp_path: Path):
    pids = tmp_path / "pids"
    program = f"import os, sys, time\nPIDS = {str(pids)!r}\n{FAMILY}\ntime.sleep(600)"
    code = (
        "import asyncio, os, sys; from inference.environments.external import _run; "
        "asyncio.run(_run((sys.executable, '-c', sys.argv[1]), dict(os.environ)))"
    )
    service = subprocess.Popen([sys.executable, "-c", code, program])
    try:
        _until(pids.exists)
        assert len(_running(pids)) == 4
    finally:
        service.kill()
        service.wait()
    _until(lambda: not _running(pids))


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _running(pids: Path) -> list[int]:
    return [pid for pid in map(int, pids.read_text().split()) if _runs(pid)]


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
