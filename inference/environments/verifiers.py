"""Environments of `verifiers` 0.4 (Prime Intellect), unchanged: their tasks, turns, tools and rewards, our tokens.

The environment plays its own protocol and asks its model by OpenAI's chat protocol; the model is the agent
(`inference.endpoint`), so that ids and logprobs are those that were sampled.
"""

import importlib
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inference.endpoint import MODEL, serving
from inference.environments.base import Environment, Score
from inference.environments.distinct import Distinct
from inference.environments.program import Chat, Program
from inference.graders.limited import VerifierError
from schemas.errors import SettingsError
from schemas.trajectory import Reward

SCORING = "TaskError"
"""The kind of error by which `verifiers` says that a task's own hooks, scoring among them, failed."""
MAX_REPEATS = 10_000
"""Repeats in a row after which a task set that never ends counts as exhausted."""
LABELS = {"idx", "id", "name", "description"}
"""What a task is called; the rest of its data is what it is."""


class Options(BaseModel):
    """A verifiers family's `options`: one of the two."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: dict[str, Any] = {}
    """What stands under `[env]` in settings of verifiers, such as `{taskset = {id = "my-tasks"}}`."""
    load: Annotated[str, Field(pattern=r"^([\w.]+:\w+)?$")] = ""
    """`module:function` that returns an environment; called once for each episode."""


def build(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    """Task `index` of the environment's task set, which comes in an order of its own: `seed` has no part in it.

    A task that has come before is left out.

    Raises:
        SettingsError: the package or the environment is missing, or refuses its settings; or there is no such task.
    """
    try:
        checked = Options.model_validate(dict(options))
    except ValidationError as error:
        raise SettingsError(f"options of family {family}: {error}") from error
    if importlib.util.find_spec("verifiers") is None:
        raise SettingsError("the package verifiers is missing: pip install 'lagoon-rl[environments]'")
    if bool(checked.env) == bool(checked.load):
        raise SettingsError(f"options of family {family}: expected either env or load")
    settings = checked.model_dump_json()
    try:
        task = _tasks(settings).get(index)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SettingsError(f"family {family}: verifiers cannot load it: {type(error).__name__}: {error}") from error
    if task is None:
        raise SettingsError(f"family {family}: the task set has no task {index}; lower its num_tasks")
    return Verifiers(task, settings)


class Verifiers(Program):
    """One task, played by its environment."""

    def __init__(self, task: Any, settings: str):
        self.task, self.settings = task, settings
        self.trace: Any = None

    async def converse(self, chat: Chat) -> str:
        """Let the environment run the episode.

        Raises:
            RuntimeError: it failed other than in scoring.
        """
        vf = _package()
        environment = _load(self.settings)
        async with serving(chat) as endpoint, environment.serving():
            client = vf.EvalClientConfig(base_url=endpoint.url, api_key_var="LAGOON_NO_KEY")
            episode = await environment.run_episode(self.task, vf.ModelContext(model=MODEL, client=client))
        traces = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
        self.trace = traces[0] if traces else None
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok and (self.trace is None or any(error.type != SCORING for error in errors)):
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "not completed")
        return self.trace.root_reply or ""

    async def score(self, answer: str) -> Score:
        """The weighted sum of the environment's rewards; its rewards and metrics are the parts."""
        rewards = self.trace.rewards
        if self.trace.errors or any(reward is None for reward in rewards.values()):
            raise VerifierError("; ".join(error.message for error in self.trace.errors) or f"no rewards: {rewards}")
        parts = [Reward(name, float(reward.score)) for name, reward in rewards.items()]
        parts += [Reward(name, float(value)) for name, value in self.trace.metrics.items() if value is not None]
        return Score(float(self.trace.reward), tuple(parts))


@cache
def _tasks(settings: str) -> Distinct[Any]:
    return Distinct(iter(_load(settings).taskset), lambda task: task.data.model_dump_json(exclude=LABELS), MAX_REPEATS)


def _load(settings: str) -> Any:
    """The environment, made anew: what it serves belongs to one episode."""
    options, vf = Options.model_validate_json(settings), _package()
    if options.load:
        module, _, function = options.load.partition(":")
        return getattr(importlib.import_module(module), function)()
    return vf.load_environment(vf.resolve_env_config(_seated(json.loads(json.dumps(options.env)))))


def _seated(env: dict[str, Any]) -> dict[str, Any]:
    """`env` with what it and its task set leave open about its seats: our chat loop, on this machine."""
    vf, taskset = _package(), env.get("taskset", {}).get("id", "")
    ships_harness = vf.default_harness_id(taskset) != "bash"
    for name, field in vf.env_config_type(taskset, env.get("id", "")).model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            seat, declared = env.setdefault(name, {}), field.default.harness
            if "runtime" not in field.default.model_fields_set:
                seat.setdefault("runtime", {"type": "subprocess"})
            if not ships_harness if declared is None else declared.id == "null":
                seat.setdefault("harness", {"id": "lagoon_chat"})
    return env


def _package() -> Any:
    """`verifiers.v1`, which takes seconds to import, with our harness."""
    importlib.import_module("inference.environments.verifiers_chat")
    return importlib.import_module("verifiers.v1")
