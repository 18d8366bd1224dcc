"""Reasoning Gym (Stojanovski et al. 2025, arXiv:2505.24760): procedural puzzles with scorers, from its package.

A family is one data set with its settings; task i is the i-th different question that its seeds make, which come from
(family, seed). Scorers are other people's code and some are slow, so they run in processes that are killed at a limit.
"""

import importlib
import importlib.util
import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import count
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inference.engines.base import request_seed
from inference.environments.base import Environment, Message, Score
from inference.environments.distinct import Distinct
from inference.graders.limited import VerifierError, limited
from schemas.errors import SettingsError
from schemas.trajectory import Reward

INSTRUCTION = "{question}\n\nGive the final answer between <answer> and </answer>, and nothing else between them."
QUEUE_S = 3600.0
"""A scorer has a limit of its own, and the episode's limit bounds its wait; this is the limit of last resort."""

MAX_REPEATS = 1000
"""Repeats in a row after which a data set counts as exhausted."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Options(BaseModel):
    """A Reasoning Gym family's `options`. `dataset` defaults to the family's own name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str
    config: dict[str, Any] = {}
    """Settings of the data set, such as its difficulty; all but `seed` and `size`, which are the task's."""
    score_s: Annotated[float, Field(gt=0, le=600)] = 60.0
    """Seconds that scoring an answer may take; the first ones of a process include importing the package."""


def build(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    """Task `index` of `family`.

    Raises:
        SettingsError: the package is missing, there is no such data set, or it refuses its settings or has too few
            questions.
    """
    try:
        checked = Options.model_validate({"dataset": family} | dict(options))
    except ValidationError as error:
        raise SettingsError(f"options of family {family}: {error}") from error
    questions = _questions(checked.model_dump_json(), family, seed)
    try:
        found = questions.get(index)
    except (AssertionError, TypeError, ValueError) as error:
        raise SettingsError(
            f"options of family {family}: {checked.dataset} refuses {checked.config}: {error}"
        ) from error
    if found is None:
        raise SettingsError(
            f"family {family}: {checked.dataset} with {checked.config} has {len(questions)} questions; "
            "lower its num_tasks"
        )
    return ReasoningGym(*found, checked)


@lru_cache(maxsize=256)
def _questions(settings: str, family: str, seed: int) -> Distinct[tuple[str, int]]:
    """The questions of a family, each with the seed that makes it."""
    options = Options.model_validate_json(settings)

    def draw(number: int) -> tuple[str, int]:
        task_seed = request_seed("reasoning-gym", family, seed, number) % 2**31
        return generate(options.dataset, options.config, task_seed)[1]["question"].strip(), task_seed

    return Distinct(map(draw, count()), lambda made: made[0], MAX_REPEATS)  # not a generator: it outlives an exception


def datasets() -> Mapping[str, Any]:
    """The data sets by name.

    Raises:
        SettingsError: the package is not installed.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise SettingsError("Reasoning Gym needs the package reasoning-gym: pip install 'lagoon-rl[environments]'")
    importlib.import_module("reasoning_gym")  # takes seconds, and registers the data sets
    return importlib.import_module("reasoning_gym.factory").DATASETS


def generate(dataset: str, config: Mapping[str, Any], seed: int) -> tuple[Any, Mapping[str, Any]]:
    """The data set of one entry that `seed` makes, and the entry: `question`, `answer`, `metadata`.

    Raises:
        SettingsError: there is no such data set, or `config` sets what is the task's.
        Exception: what the data set raises for settings that it refuses.
    """
    known = datasets()
    if dataset not in known:
        raise SettingsError(f"no data set {dataset!r} in Reasoning Gym; there is {', '.join(sorted(known))}")
    if taken := config.keys() & {"seed", "size"}:
        raise SettingsError(f"config of {dataset} sets {', '.join(sorted(taken))}, which the task sets")
    made = importlib.import_module("reasoning_gym").create_dataset(dataset, **config, seed=seed, size=1)
    return made, made[0]


def grade(dataset: str, config: Mapping[str, Any], seed: int, answer: str) -> float:
    """What the data set's scorer says of `answer`; 0 if it breaks over that, but not over the data set's own answer.

    Runs in a verifying process.

    Raises:
        Exception: what the scorer raises.
    """
    made, entry = generate(dataset, config, seed)
    try:
        return float(made.score_answer(answer, entry))
    except Exception:  # the scorers are other people's: some take for granted what an answer looks like
        made.score_answer(entry["answer"], entry)
        return 0.0


class ReasoningGym(Environment):
    """One puzzle, one turn."""

    score_timeout_s = QUEUE_S
    verifier = f"{__name__}:grade"

    def __init__(self, question: str, task_seed: int, options: Options):
        self.question, self.task_seed, self.options = question, task_seed, options

    def reset(self, seed: int) -> list[Message]:
        """The puzzle and how to answer, as one user message."""
        return [{"role": "user", "content": INSTRUCTION.format(question=self.question)}]

    def parse(self, action: str) -> tuple[()]:
        """No tools: every action is the answer."""
        return ()

    async def score(self, answer: str) -> Score:
        """The scorer's reward in [0, 1] of what stands in the last pair of tags; 0 without one (`format`)."""
        found = _ANSWER.findall(answer)
        if not found:
            return Score(0.0, (Reward("format", 0.0),))
        options = self.options
        arguments = (options.dataset, json.loads(json.dumps(options.config)), self.task_seed, found[-1].strip())
        reward = await limited(self.verifier, *arguments, limit_s=options.score_s)
        if not isinstance(reward, float) or not (math.isfinite(reward) and 0 <= reward <= 1):
            raise VerifierError(f"the scorer of {options.dataset} gave {reward!r}; expected a number in [0, 1]")
        return Score(reward, (Reward("format", 1.0),))
