"""A task in which one turn decides and the others are noise, and a policy that tosses a coin at each."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from inference.engines.base import Generation
from inference.environments.base import Environment, Message, Score, Tool, ToolError
from inference.environments.calls import Call, Malformed
from inference.tokenizer import END, ChatTokenizer
from schemas.messages import Branch
from schemas.trajectory import Trajectory, WeightVersionSpan

NAME = "tests.road:build"
TURNS = 5
"""Crossings on the road, and one more turn to arrive."""


def build(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    """The road whose crossing `decisive` counts."""
    return Road(int(options["decisive"]), bool(options.get("declares")))


class Road(Environment):
    """`TURNS` crossings; who went left at the decisive one arrives. What is seen on the way comes from the seed."""

    def __init__(self, decisive: int, declares: bool = False) -> None:
        self.decisive, self.ways = decisive, list[str]()
        both = (lambda arguments: [{"way": "left"}, {"way": "right"}]) if declares else None
        self.tools = {"go": Tool(self._go, alternatives=both)}

    def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random(seed)
        return [{"role": "user", "content": "go"}]

    async def _go(self, arguments: dict[str, Any]) -> str:
        if (way := arguments.get("way")) not in {"left", "right"}:
            raise ToolError("left or right")
        self.ways.append(way)
        return f"{self.rng.randrange(100)} {way}"

    async def score(self, answer: str) -> Score:
        return Score(float(self.ways[self.decisive] == "left"))


class Babble(Road):
    """The road for a policy that says anything: an action of an even number of characters goes left."""

    def parse(self, action: str) -> Sequence[Call | Malformed]:
        way = ("left", "right")[len(action) % 2]
        return [Call("go", {"way": way}, action)] if len(self.ways) < TURNS else []


def build_babble(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    """The same road, for a policy that says anything."""
    return Babble(int(options["decisive"]))


class Numbers(Environment):
    """A road for a policy that answers with numbers: at each of `TURNS` crossings it is asked for one of two.

    An even one goes left, and who goes left at the decisive crossing arrives. The numbers of the first crossing are the
    task's, those of later ones come from the seed.
    """

    def __init__(self, decisive: int, index: int) -> None:
        self.decisive, self.numbers, self.first = decisive, list[str](), random.Random(f"numbers/{index}")
        self.tools = {"go": Tool(self._go)}

    def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random(seed)
        return [{"role": "user", "content": _asked(self.first)}]

    def parse(self, action: str) -> Sequence[Call | Malformed]:
        return [Call("go", {"number": action}, action)] if len(self.numbers) < TURNS - 1 else []

    async def _go(self, arguments: dict[str, Any]) -> str:
        self.numbers.append(arguments["number"])
        return _asked(self.rng)

    async def score(self, answer: str) -> Score:
        number = [*self.numbers, answer][self.decisive]
        return Score(float(number[-1:] in set("02468")))


def build_numbers(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    """Road `index` of numbers, whose crossing `decisive` counts."""
    return Numbers(int(options["decisive"]), index)


def _asked(rng: random.Random) -> str:
    return "larger of {} and {}".format(*rng.sample(range(10, 100), 2))


class Coin:
    """An engine whose policy goes left or right with equal probability, by the seed of the request."""

    weight_version, busy_s, fault = 1, 0.0, ""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    async def generate(self, session: str, token_ids: Sequence[int], *, seed: int, **_: object) -> Generation:
        arrived = self._tokenizer.decode(token_ids).count("</call>") == TURNS
        way = random.Random(seed).choice(["left", "right"])
        text = "arrived" if arrived else f'<call>{{"name": "go", "arguments": {{"way": "{way}"}}}}</call>'
        said = self._tokenizer.encode(text + END)
        return Generation(tuple(said), (-0.5,) * len(said), (WeightVersionSpan(0, len(said), 1),), stopped=True)

    def release(self, session: str) -> None:
        """Nothing is kept."""


def branch_of(parent: Trajectory, turn: int) -> Branch:
    """The branch that leaves `parent` at `turn`."""
    return Branch(
        parent_id=parent.trajectory_id,
        group_id=parent.group_id,
        group_index=parent.group_index,
        attempt=parent.attempt,
        token_ids=parent.token_ids[: parent.turns[turn].action_start],
        actions=tuple((t.action_start, t.action_end) for t in parent.turns[:turn]),
        action=parent.token_ids[parent.turns[turn].action_start : parent.turns[turn].action_end],
    )
