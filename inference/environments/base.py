"""What an environment is, and how one is found by name.

An environment is one task made playable: a prompt, tools, and a score for the final answer. A new one is a subclass of
`Environment` with `reset` and `score`, a `build` function, and a line in `ENVIRONMENTS`; or `build` in any importable
module, named in the settings as `environment = "my_package.my_module:build"`.
"""

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference.environments.calls import Call, Malformed, parse_calls
from schemas.errors import SettingsError
from schemas.names import ResultStatus
from schemas.settings import Family
from schemas.trajectory import Reward

Message = dict[str, Any]
"""A chat message in OpenAI's form: `role` and `content`."""


class ToolError(Exception):
    """A tool refuses or fails in its own terms; the agent sees the text and may try again.

    Any other exception from a tool is a failure of the environment: the episode ends without a reward.
    """


class ToolUnavailable(Exception):  # noqa: N818  (a state that passes, not a fault)
    """The tool's service cannot be reached or is overloaded; the call may be tried again (`Tool.retries`)."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that an agent may call.

    Attributes:
        run: Takes the call's arguments, returns the observation. Must not block the event loop (`asyncio.to_thread`).
        timeout_s: Limit of one call, in seconds; None takes `rollout.tool_timeout_s`.
        run_batch: Takes the arguments of several calls, returns their observations, or a ToolError for one that failed,
            in order. Calls of one turn are merged, and those of other episodes too where `run_batch` is the same
            function, or a method of the same object. Tools without one run the calls of a turn concurrently.
        batch_window_s: How long the first call of a batch waits for others, in seconds.
        max_batch: Calls that go in one request at most.
        retries: Further tries after a ToolUnavailable, after waits that grow and vary at random.
        rate_per_s: Calls a second that a process may begin; None for any.
        max_concurrent: Calls at once from a process; None for any.
        service: Names what the limits belong to, where several tools or environments share it.
        alternatives: Takes the arguments of a call, returns those that it could have had. Branches of a turn with one
            call of this tool try these, one each, in place of sampling the turn anew. All of them, the call's own too:
            what a turn is compared with must not depend on what it chose.
    """

    run: Callable[[dict[str, Any]], Awaitable[str]]
    timeout_s: float | None = None
    run_batch: Callable[[Sequence[dict[str, Any]]], Awaitable[Sequence[str | ToolError]]] | None = None
    batch_window_s: float = 0.0
    max_batch: int = 64
    retries: int = 0
    rate_per_s: float | None = None
    max_concurrent: int | None = None
    service: str = ""
    alternatives: Callable[[dict[str, Any]], Sequence[dict[str, Any]]] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What came back for one call: `text` is the observation, or the error in words; `attempts` counts tries."""

    call: Call | Malformed
    status: ResultStatus
    text: str
    latency_s: float = 0.0
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome reward of an answer, and the named parts that explain it."""

    reward: float
    parts: tuple[Reward, ...] = ()


class Environment(ABC):
    """One task, playable once after each `reset`. Everything random in it comes from the seed of `reset`.

    So the same seed and the same actions lead to the same state: a branch of an episode goes back to a turn by them.
    """

    tools: Mapping[str, Tool] = {}
    score_timeout_s: float | None = None
    """Limit of `score`, in seconds; None takes `rollout.tool_timeout_s`."""

    @abstractmethod
    def reset(self, seed: int) -> list[Message]:
        """Start an episode; returns the prompt. `seed` belongs to the episode: siblings of a group differ in it."""

    @abstractmethod
    async def score(self, answer: str) -> Score:
        """The reward of the final answer. An exception here is the verifier's failure, not the agent's."""

    def parse(self, action: str) -> Sequence[Call | Malformed]:
        """The tool calls in `action`; none means that `action` is the final answer."""
        return parse_calls(action)

    def write(self, call: Call) -> str:
        """The action that makes `call`: override it with `parse`, where tools have alternatives."""
        return f"<call>{json.dumps({'name': call.tool, 'arguments': call.arguments}, ensure_ascii=False)}</call>"

    def observe(self, result: Result) -> str:
        """What the agent reads of `result`."""
        return result.text

    def turn_reward(self, action: str, results: Sequence[Result]) -> float:
        """Process reward of one turn; `results` is empty for a final answer."""
        return 0.0

    async def close(self) -> None:  # noqa: B027  (most have nothing to free)
        """Free what the episode holds."""


Build = Callable[[str, int, int, Mapping[str, Any]], Environment]
"""(family, index, seed, options) -> environment. The task depends on these four alone."""

ENVIRONMENTS = {
    "bfcl": "inference.environments.bfcl:build",
    "calculator": "inference.environments.calculator:build",
    "external": "inference.environments.external:build",
    "humaneval": "inference.environments.humaneval:build",
    "judged": "inference.environments.judged:build",
    "reasoning-gym": "inference.environments.reasoning_gym:build",
    "verifiers": "inference.environments.verifiers:build",
}


def build(environment: str, family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    """Task `index` of `family`, under the task-set `seed` (the run's seed, the same for every draw of the task).

    Raises:
        SettingsError: no such environment, or options that it does not take.
    """
    return builder(environment)(family, index, seed, options)


def try_families(families: Sequence[Family], seed: int) -> None:
    """Build the last task of each family, so that one that cannot be played stops a service at its start.

    Raises:
        SettingsError: an environment is unknown, refuses its options, has fewer tasks, or lacks what it needs on this
            machine.
    """
    for family in families:
        build(family.environment, family.name, family.num_tasks - 1, seed, family.options)


def builder(environment: str) -> Build:
    """The `build` function of `environment`: a name in ENVIRONMENTS, or `module:function`.

    Raises:
        SettingsError: no such environment.
    """
    module, colon, function = ENVIRONMENTS.get(environment, environment).partition(":")
    if not colon:
        raise SettingsError(f"environment {environment!r}; expected one of {sorted(ENVIRONMENTS)} or module:function")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"environment {environment!r} cannot be imported: {error}") from error
