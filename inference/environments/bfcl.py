"""BFCL (Patil et al. 2025): one function, one request; the reward is 1 if the answer is a call that the request allows.

The category `simple_python` of the Berkeley Function Calling Leaderboard, read from the package `bfcl-eval`, of which
only the data are used. The prompt shows three solved problems; they are no tasks.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from inference.environments.base import Environment, Message, Score
from inference.graders.function_call import grade_call, read_call
from schemas.errors import SettingsError
from schemas.trajectory import Reward

CATEGORY = "simple_python"
SHOWN = range(100, 103)
"""The problems that the prompt solves."""

INSTRUCTION = "Answer with one call of the function in Python's syntax, arguments by keyword, and nothing else."


@cache
def problems() -> tuple[Mapping[str, Any], ...]:
    """The 400 problems: `question` (text), `function` (description), `allowed` (parameter -> allowed values).

    Raises:
        SettingsError: the data are not installed.
    """
    package = importlib.util.find_spec("bfcl_eval")
    if package is None or package.origin is None:
        raise SettingsError(
            "BFCL needs the data in the package bfcl-eval: `make setup`, or "
            "pip install --no-deps --require-hashes -r requirements-data.txt (its own dependencies are not needed)"
        )
    data = Path(package.origin).parent / "data"
    tasks = _lines(data / f"BFCL_v4_{CATEGORY}.json")
    answers = {a["id"]: a["ground_truth"][0] for a in _lines(data / "possible_answer" / f"BFCL_v4_{CATEGORY}.json")}
    return tuple(
        {
            "question": task["question"][0][-1]["content"],
            "function": task["function"][0],
            "allowed": next(iter(answers[task["id"]].values())),
        }
        for task in tasks
    )


def build(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    """Problem `index`, those that the prompt shows left out.

    Raises:
        SettingsError: there is no such problem, the data are missing, or options are given.
    """
    if options:
        raise SettingsError(f"options of family {family}: {sorted(options)}; BFCL takes none")
    tasks = [p for i, p in enumerate(problems()) if i not in SHOWN]
    if index >= len(tasks):
        raise SettingsError(f"family {family}: BFCL {CATEGORY} has {len(tasks)} tasks; lower its num_tasks")
    return BFCL(tasks[index])


def solution(problem: Mapping[str, Any]) -> str:
    """A right answer: each parameter's first allowed value, those left out that may be."""
    required = problem["function"]["parameters"]["required"]
    arguments = {p: _first(v) for p, v in problem["allowed"].items() if "" not in v or p in required}
    return f"{problem['function']['name']}({', '.join(f'{p}={v!r}' for p, v in arguments.items())})"


class BFCL(Environment):
    """One problem, one turn."""

    def __init__(self, problem: Mapping[str, Any]):
        self.problem = problem

    def reset(self, seed: int) -> list[Message]:
        """The three solved problems as earlier turns, then this one."""
        messages: list[Message] = [{"role": "system", "content": INSTRUCTION}]
        for shown in (problems()[i] for i in SHOWN):
            messages += [_ask(shown), {"role": "assistant", "content": solution(shown)}]
        return [*messages, _ask(self.problem)]

    def parse(self, action: str) -> tuple[()]:
        """The call is the answer; no tool runs."""
        return ()

    async def score(self, answer: str) -> Score:
        """1 if the call's name and arguments are as BFCL allows, else 0; the part `format` is 1 for any one call."""
        reward = grade_call(answer, self.problem["function"], self.problem["allowed"])
        return Score(reward, (Reward("format", float(read_call(answer) is not None)),))


def _ask(problem: Mapping[str, Any]) -> Message:
    return {"role": "user", "content": f"{json.dumps(problem['function'])}\n\n{problem['question']}"}


def _first(allowed: Sequence[Any]) -> Any:
    """The first allowed value; within an object, of each of its fields."""
    return _settled(next(a for a in allowed if a != ""))


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _first(v) for k, v in value.items() if "" not in v}
    return [_settled(v) for v in value] if isinstance(value, list) else value


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
