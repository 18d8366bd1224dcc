"""Episodes played by any program that speaks OpenAI's chat protocol, started once for each of them.

It finds the agent at `OPENAI_BASE_URL` and its task in `LAGOON_TASK` (JSON: `family`, `index`, `seed` of the task set,
`episode_seed`). The reward is what it posts to `$OPENAI_BASE_URL/finish`, or what a grader says of its output, or the
last line of its output. The program is yours: it runs with the rights of the service, not in the sandbox.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inference.endpoint import serving
from inference.environments.base import Environment, Score
from inference.environments.program import Chat, Program
from inference.graders.limited import VerifierError, limited
from schemas.errors import SettingsError

PASSED = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables that every program gets of the service's; secrets are passed by name (`pass_variables`)."""
MAX_OUTPUT_BYTES = 1 << 20
END_S = 10.0
"""Limit of ending a program and what it has started; what takes longer belongs to another user, or waits for a disk."""

REAPER = (sys.executable, "-IS", str(Path(__file__).with_name("reaper.py")))


class Options(BaseModel):
    """An external family's `options`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    grader: Annotated[str, Field(pattern=r"^([\w.]+:\w+)?$")] = ""
    """`module:function` of (output, task) to a reward, run in a process of its own; empty without one."""
    grade_s: Annotated[float, Field(gt=0, le=600)] = 60.0
    pass_variables: tuple[str, ...] = ()


def build(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    """Task `index`.

    Raises:
        SettingsError: wrong options, a command that does not exist, or a variable that is not set.
    """
    try:
        checked = Options.model_validate(dict(options))
    except ValidationError as error:
        raise SettingsError(f"options of family {family}: {error}") from error
    if shutil.which(checked.command[0]) is None:
        raise SettingsError(f"family {family}: no program {checked.command[0]!r} to run")
    if missing := [name for name in checked.pass_variables if name not in os.environ]:
        raise SettingsError(f"family {family}: the environment variables {missing} are not set")
    return External({"family": family, "index": index, "seed": seed}, checked)


class External(Program):
    """One run of the program."""

    def __init__(self, task: Mapping[str, Any], options: Options):
        self.task, self.options = task, options
        self.posted: float | None = None
        self.score_timeout_s = options.grade_s + 60.0

    async def converse(self, chat: Chat) -> str:
        """Run the program to its end; returns its output.

        Raises:
            RuntimeError: it ended with an error.
        """
        async with serving(chat) as endpoint:
            code, output, errors = await _run(self.options.command, self._variables(endpoint.url))
            self.posted = endpoint.reward
        if code != 0 and self.posted is None:
            raise RuntimeError(f"{self.options.command[0]} ended with {code}: {errors[-500:]}")
        return output

    async def score(self, answer: str) -> Score:
        """What was posted, or the grader's, or the last line of the output."""
        if self.posted is not None:
            return Score(self.posted)
        if self.options.grader:
            return Score(float(await limited(self.options.grader, answer, self.task, limit_s=self.options.grade_s)))
        last = answer.strip().rpartition("\n")[2]
        try:
            return Score(float(last))
        except ValueError as error:
            raise VerifierError(f"the program posted no reward, and its last line is none: {last[:200]!r}") from error

    def _variables(self, url: str) -> dict[str, str]:
        passed = {name: os.environ[name] for name in (*PASSED, *self.options.pass_variables) if name in os.environ}
        task = json.dumps({**self.task, "episode_seed": self.seed})
        return passed | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "LAGOON_TASK": task}


async def _run(command: tuple[str, ...], variables: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, and the ends of output and errors. The program is gone afterwards, and whatever it has started."""
    process = await asyncio.create_subprocess_exec(
        *REAPER,
        *command,
        env=variables,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101 - all are pipes
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    try:
        process.stdin.write(b"\n")
        output, errors = await asyncio.gather(_end(process.stdout), _end(process.stderr))
        return await process.wait(), output, errors
    finally:
        process.stdin.close()
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)  # the program may have stopped its parent
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _end(stream: asyncio.StreamReader) -> str:
    """The end of what comes, as text."""
    kept = b""
    while chunk := await stream.read(1 << 16):
        kept = (kept + chunk)[-MAX_OUTPUT_BYTES:]
    return kept.decode(errors="replace")
