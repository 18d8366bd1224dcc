"""How idle the engine is on a long tail: tasks pulled as room appears, or batches that wait for their slowest.

OMP_NUM_THREADS=1 python -m tests.benchmarks.longtail [--seconds 15] [--out bench.jsonl]

Episodes of two turns of log-normal length (median 24 tokens, mean 40, at most 200) around a tool that takes 0 to 2 s.
Both ways play the same tasks on the same embedded engine with as many places, by the code that a rollout service runs.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference.agent import Limits, Live, play
from inference.engines.torch_engine import TorchEngine
from inference.environments.base import Score
from inference.environments.program import Chat, Program
from inference.rollouts import Rollouts
from inference.tokenizer import ChatTokenizer, make_tokenizer
from inference.tools import Toolbox
from schemas.messages import Task
from schemas.settings import Rollout
from schemas.trajectory import Trajectory
from tests.benchmarks.lines import tell
from tests.policies import write_policy
from tests.rollout_fakes import task

GROUP_SIZE, PLACES, MAX_TOKENS = 8, 96, 512
ENVIRONMENT = "tests.benchmarks.longtail:build"


def build(family: str, index: int, seed: int, options: Mapping[str, Any]) -> "Errand":
    """Any task: what varies is the episode."""
    return Errand(options["tool_s"])


class Errand(Program):
    """Speak, wait for a tool, speak: for as long as the episode's seed says."""

    def __init__(self, tool_s: float) -> None:
        self.tool_s = tool_s

    async def converse(self, chat: Chat) -> str:
        """Two turns of log-normal length around a tool that takes between 0 and `tool_s` seconds."""
        rng = random.Random(self.seed)
        said: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for _ in range(2):
            reply = await chat.reply(said, max_tokens=max(1, min(200, round(rng.lognormvariate(3.18, 1.0)))))
            said += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "on"}]
            await asyncio.sleep(rng.uniform(0, self.tool_s) if len(said) == 3 else 0)
        return ""

    async def score(self, answer: str) -> Score:
        """The same for all."""
        return Score(1.0)


def tasks() -> Iterator[Task]:
    """Without end."""
    for draw in range(10**9):
        yield task(draw, index=draw, group_size=GROUP_SIZE, environment=ENVIRONMENT, options={"tool_s": 2.0})


async def as_room_appears(rollouts: Rollouts, until: float) -> None:
    """A group as soon as it fits."""
    for one in tasks():
        while rollouts.room < GROUP_SIZE:
            await asyncio.sleep(0.005)
        if time.perf_counter() > until:
            return
        rollouts.start(one)


async def in_batches(rollouts: Rollouts, until: float) -> None:
    """As many groups as fit, and no other before all of them have ended."""
    todo = tasks()
    while time.perf_counter() < until:
        for _ in range(PLACES // GROUP_SIZE):
            rollouts.start(next(todo))
        while rollouts.num_running:
            await asyncio.sleep(0.005)


async def measure(folder: Path, way: Callable[[Rollouts, float], Awaitable[None]], seconds: float) -> dict[str, float]:
    """Idle share of the engine and what was played, until `seconds` have passed and the way has ended."""
    engine = TorchEngine(folder, 1, max_sessions=PLACES, max_tokens=MAX_TOKENS)
    limits = replace(Limits.of(Rollout()), max_turn_tokens=200, max_tokens=MAX_TOKENS, episode_timeout_s=600)
    options: dict[str, Any] = {
        "engine": engine,
        "tokenizer": ChatTokenizer(make_tokenizer([""]).to_str()),
        "toolbox": Toolbox(),
        "limits": limits,
        "producer": "benchmark",
    }
    done: list[Trajectory] = []

    async def one(of: Task, index: int, live: Live) -> Trajectory:
        return await play(of, index, live=live, **options)

    rollouts = Rollouts(one, done.append, PLACES, "benchmark")
    begun = time.perf_counter()
    await way(rollouts, begun + seconds)
    took_s, busy_s, num_done = time.perf_counter() - begun, engine.busy_s, len(done)
    await rollouts.drain(60)
    await engine.close()
    assert {r.error for r in done} == {None}
    return {"idle": round(1 - busy_s / took_s, 3), "episodes_per_s": round(num_done / took_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        write_policy(Path(name))
        for way in (as_room_appears, in_batches):
            figures[way.__name__] = asyncio.run(measure(Path(name), way, args.seconds))
    idle, reference = (figures[way.__name__]["idle"] for way in (as_room_appears, in_batches))
    line = {"name": f"idle engine, {PLACES} places", "value": idle, "unit": "share", "reference": reference}
    tell(line | {"ratio": round(idle / reference, 3)} | figures, args.out)


if __name__ == "__main__":
    main()
