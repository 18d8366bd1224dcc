"""Prompts from a file, answers scored by a service (`inference.graders.judge`).

Line i of the file is task i, as JSON: `{"prompt": "..."}` or `{"prompt": [messages]}`. What else stands in the line,
such as a reference, goes to the judge with prompt and answer. No prompt stands there twice.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from inference.environments.base import Environment, Message, Score
from inference.graders.judge import QUEUE_S, JudgeOptions, judged
from schemas.errors import SettingsError


class Options(BaseModel):
    """A judged family's `options`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompts: Path
    judge: JudgeOptions


def build(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    """The prompt of line `index`.

    Raises:
        SettingsError: wrong options, a file that cannot be read, too few lines, or the judge's secret is missing.
    """
    try:
        checked = Options.model_validate(dict(options))
    except ValidationError as error:
        raise SettingsError(f"options of family {family}: {error}") from error
    checked.judge.check()
    lines = prompts(checked.prompts)
    if index >= len(lines):
        raise SettingsError(f"family {family}: {checked.prompts} has {len(lines)} prompts; lower its num_tasks")
    return Judged(lines[index], checked.judge)


@cache
def prompts(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The lines of a file of prompts.

    Raises:
        SettingsError: it cannot be read, or a line is no object with a prompt of its own.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"prompts {path}: {error}") from error
    first: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not isinstance(line.get("prompt"), str | list):
            raise SettingsError(f"prompts {path}, line {number}: expected an object with a prompt (text or messages)")
        if (known := first.setdefault(json.dumps(_messages(line)), number)) != number:
            raise SettingsError(
                f"prompts {path}, line {number}: the prompt of line {known} again; expected each once, so "
                "that none that is held out is trained on"
            )
    return tuple(lines)


class Judged(Environment):
    """One prompt, one turn."""

    score_timeout_s = QUEUE_S

    def __init__(self, line: Mapping[str, Any], judge: JudgeOptions):
        self.line, self.judge = line, judge

    def reset(self, seed: int) -> list[Message]:
        """The prompt."""
        return _messages(self.line)

    def parse(self, action: str) -> tuple[()]:
        """No tools: every action is the answer."""
        return ()

    async def score(self, answer: str) -> Score:
        """The judge's."""
        return Score(await judged(self.judge, {**self.line, "answer": answer}))


def _messages(line: Mapping[str, Any]) -> list[Message]:
    prompt = line["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
