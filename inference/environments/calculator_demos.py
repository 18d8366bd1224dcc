"""A scripted calculator user, deliberately imperfect: what it does well half of the time is what training sharpens."""

import random
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from inference.environments.base import ToolError
from inference.environments.calculator import ERROR, Options, calculate
from inference.environments.questions import KINDS, PREVIOUS, Question


@dataclass(slots=True)
class Demonstration:
    """One scripted episode: each action and what came back for it (None for the last one)."""

    question: Question
    turns: list[tuple[str, str | None]]
    reward: float


def demonstrate(
    options: Options, rng: random.Random, *, noise: float, max_turns: int, avoid: Collection[str]
) -> Demonstration:
    """Play a fresh question of the kind in `options`; none of the texts in `avoid` comes up.

    Args:
        options: Kind, and how often the tool fails.
        rng: Decides everything.
        noise: In [0, 1]; 0 is an expert. The shares of each mistake are in `_Player`.
        max_turns: Most actions of an episode.
        avoid: Questions that are held out.
    """
    question = KINDS[options.kind](rng)
    while question.text in avoid:
        question = KINDS[options.kind](rng)
    player = _Player(question, options, rng, noise, max_turns)
    player.play()
    return Demonstration(question, player.turns, player.reward)


@dataclass(slots=True)
class _Player:
    """Plays one question. `last` is the newest result, None before the first."""

    question: Question
    options: Options
    rng: random.Random
    noise: float
    max_turns: int
    turns: list[tuple[str, str | None]] = field(default_factory=list)
    reward: float = 0.0
    last: str | None = None

    def play(self) -> None:
        numbers = re.findall(r"\d+", self.question.text)
        if self.options.kind == "larger":
            wrong = self._slips(1 / 2)
            return self._answer(self.rng.choice(numbers) if wrong else self.question.answer)
        if self.options.kind == "secret" or self._slips(1 / 2):  # a guess without the tool
            return self._answer(str(self.rng.randint(10, 199)))
        if self._slips(1 / 3):  # the whole expression at once, or a broken call
            expression = self.question.text.split()[1]
            self._say(self.rng.choice([f"<call>{expression}", f"<call>{expression}+</call>"]))
        self._follow_plan(numbers)
        if len(self.turns) < self.max_turns:
            self._answer(self.last or self.rng.choice(numbers))
        return None

    def _follow_plan(self, numbers: list[str]) -> None:
        plan = list(self.question.plan)
        while plan and len(self.turns) < self.max_turns:
            if len(plan) == 1 and self.last and self._slips(1):  # stops one call too early
                return
            call = plan[0].replace(PREVIOUS, self.last or PREVIOUS)
            if len(plan) == 2 and self._slips(1 / 3):  # takes the wrong pair of numbers
                call = f"{numbers[0]}+{numbers[2]}"
            observation = self._say(f"<call>{call}</call>")
            if observation != ERROR:
                self.last, plan = observation, plan[1:]
            elif self._slips(1):  # gives up on a call that failed
                self.last = self.rng.choice(numbers)
                return

    def _say(self, action: str) -> str:
        observation = self._observe(action)
        self.turns.append((action, None if len(self.turns) + 1 >= self.max_turns else observation))
        return observation

    def _observe(self, action: str) -> str:
        match = re.fullmatch(r"<call>([^<]*)</call>", action)
        try:
            value = calculate(match[1] if match else "")
        except ToolError:
            return ERROR
        return ERROR if self.rng.random() < self.options.fail_rate else value

    def _answer(self, text: str) -> None:
        self.turns.append((text, None))
        self.reward = float(text == self.question.answer)

    def _slips(self, share: float) -> bool:
        return self.rng.random() < self.noise * share
