"""Multi-step arithmetic with a calculator that takes one operation at a time.

A turn is either exactly `<call>75+65</call>` or the final answer; the reward is 1 if the answer equals the right one,
as text. A family of the settings chooses among the kinds of `questions.KINDS` and sets how the tool misbehaves.
"""

import asyncio
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inference.environments.base import Environment, Message, Result, Score, Tool, ToolError
from inference.environments.calls import Call, Malformed
from inference.environments.questions import KINDS, PREVIOUS, Question, question
from schemas.errors import SettingsError
from schemas.names import ResultStatus
from schemas.trajectory import Reward

TOOL = "calculator"
ERROR = "error"
"""All that the agent reads of a call that failed, whatever the reason: a tiny policy learns one word."""

_SPARE_S = 1.0
"""Between the longest call and the limit of the tool."""

Ratio = Annotated[float, Field(ge=0, le=1)]

_CALL = re.compile(r"<call>([^<]*)</call>")
_EXPRESSION = re.compile(r"(\d{1,4})([-+*])(\d{1,4})", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,9}", re.ASCII)


class ToolSeconds(BaseModel):
    """How long a call takes, in seconds: log-normal, and never more than `most`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    median: float = Field(gt=0)
    sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of the logarithm; at 1 one call in a hundred takes ten times the median."""
    most: float = Field(gt=0)

    def draw(self, rng: random.Random) -> float:
        """The duration of one call, in seconds."""
        return min(rng.lognormvariate(math.log(self.median), self.sigma), self.most)


class Options(BaseModel):
    """A calculator family's `options`. `kind` defaults to the family's own name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["add", "muladd", "chain", "larger", "flaky", "secret"]
    fail_rate: Ratio = 0.0
    """Share of good calls that the tool refuses; 0.5 by default for the kind `flaky`."""
    hang_rate: Ratio = 0.0
    """Share of good calls that never return, so that the tool's limit ends them."""
    crash_rate: Ratio = 0.0
    """Share of episodes in which the environment itself breaks: a failure of the infrastructure."""
    shots: Annotated[int, Field(ge=0, le=16)] = 0
    """Solved questions that the prompt shows, for a policy that knows nothing of the calculator."""
    tool_seconds: ToolSeconds | None = None
    """Calls that take their time, so that some episodes take many times longer than most; the tool's limit is above."""


def options_of(family: str, options: Mapping[str, Any]) -> Options:
    """The checked options of `family`.

    Raises:
        SettingsError: an unknown option, a kind that does not exist, a rate out of [0, 1].
    """
    kind = options.get("kind", family)
    defaults = {"kind": kind, "fail_rate": 0.5 if kind == "flaky" else 0.0}
    try:
        return Options.model_validate(defaults | dict(options))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise SettingsError(f"options of family {family}: {faults}; kinds are {sorted(KINDS)}") from error


def build(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    """Task `index` of a calculator family."""
    checked = options_of(family, options)
    task = question(checked.kind, family, index, seed)
    shown = (question(checked.kind, f"{family}/shown", i, seed) for i in range(checked.shots + 1))
    return Calculator(task, checked, [q for q in shown if q.text != task.text][: checked.shots])


def calculate(expression: str) -> str:
    """The value of one operation on two non-negative integers.

    Raises:
        ToolError: `expression` is anything else.
    """
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        raise ToolError("expected one operation on two non-negative integers, such as 75+65")
    a, b = int(match[1]), int(match[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[match[2]])


def solved(shown: Question) -> list[Message]:
    """A question, the calls of its plan with what comes back, and its answer."""
    messages: list[Message] = [{"role": "user", "content": shown.text}]
    value = ""
    for step in shown.plan:
        expression = step.replace(PREVIOUS, value)
        value = calculate(expression)
        messages += [
            {"role": "assistant", "content": f"<call>{expression}</call>"},
            {"role": "tool", "content": value},
        ]
    return [*messages, {"role": "assistant", "content": shown.answer}]


class Calculator(Environment):
    """One arithmetic question."""

    def __init__(self, task: Question, options: Options, shown: Sequence[Question] = ()):
        self.task = task
        self.options = options
        self.shown = shown
        limit_s = options.tool_seconds.most + _SPARE_S if options.tool_seconds else None
        self.tools = {TOOL: Tool(self._run, timeout_s=limit_s)}
        self.reset(0)

    def reset(self, seed: int) -> list[Message]:
        """The solved questions, then the one to solve."""
        self.rng = random.Random(f"calculator/{seed}")
        self.crashes = self.rng.random() < self.options.crash_rate
        return [*(m for q in self.shown for m in solved(q)), {"role": "user", "content": self.task.text}]

    def parse(self, action: str) -> Sequence[Call | Malformed]:
        """One call and nothing else, or an answer; any trace of a call tag beside that is malformed."""
        if "call>" not in action:
            return ()
        match = _CALL.fullmatch(action)
        if match is None:
            return (Malformed("expected <call>expression</call> and nothing else", action),)
        return (Call(TOOL, {"expression": match[1]}, match[1]),)

    def observe(self, result: Result) -> str:
        """The value, or one word for every failure."""
        return result.text if result.status == ResultStatus.OK else ERROR

    def turn_reward(self, action: str, results: Sequence[Result]) -> float:
        """1 for a call that the tool could read, or an answer that is a number; else 0."""
        if not results:
            return float(_NUMBER.fullmatch(action) is not None)
        return float(all(isinstance(r.call, Call) and _EXPRESSION.fullmatch(r.call.text) for r in results))

    async def score(self, answer: str) -> Score:
        """1 for the right answer, as text; 0 for any other."""
        self._maybe_crash()
        well_formed = float(_NUMBER.fullmatch(answer) is not None)
        correct = float(answer == self.task.answer)
        return Score(correct, (Reward("correct", correct), Reward("format", well_formed)))

    async def _run(self, arguments: dict[str, Any]) -> str:
        self._maybe_crash()
        value = calculate(arguments["expression"])
        if self.options.tool_seconds:
            await asyncio.sleep(self.options.tool_seconds.draw(self.rng))
        if self.rng.random() < self.options.hang_rate:
            await asyncio.Event().wait()
        if self.rng.random() < self.options.fail_rate:
            raise ToolError("the calculator is out of order; try again")
        return value

    def _maybe_crash(self) -> None:
        if self.crashes:
            raise RuntimeError("the calculator's sandbox is gone")
