"""Agents on a vLLM server against a bare load generator on the same server, and what a weight swap costs.

The generator replays the very requests that the agents made: same contexts, same numbers of tokens, same concurrency.

OMP_NUM_THREADS=1 python -m tests.benchmarks.rollout --out FILE
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inference.agent import Limits, play
from inference.engines.base import Generation
from inference.engines.vllm.engine import LOAD, STALL, VllmEngine
from inference.metered import MeteredEngine, TokenBudget
from inference.tokenizer import ChatTokenizer, make_tokenizer, save_tokenizer
from infra.usage import Usage
from schemas.settings import Family, Rollout, Settings, Vllm
from tests.benchmarks.episodes import tasks
from tests.policies import write_policy

CONCURRENCY = 32
NUM_EPISODES = 160
TURN_TOKENS = 96
NUM_SWAPS = 5


@dataclass
class Recording:
    """An engine that notes what it was asked and how much it said, session by session."""

    engine: VllmEngine
    asked: dict[str, list[tuple[list[int], int]]] = field(default_factory=lambda: defaultdict(list))

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    async def generate(self, session: str, token_ids: Sequence[int], **options: object) -> Generation:
        said = await self.engine.generate(session, token_ids, **options)  # type: ignore[arg-type]
        self.asked[session].append((list(token_ids), len(said.token_ids)))
        return said


class NoUsage:
    """Usage that is sent nowhere."""

    def send(self, *_: object, **__: object) -> None:
        """Drop it."""


async def at_once(jobs: Sequence[object]) -> float:
    """Run each of `jobs`, coroutine functions, CONCURRENCY at a time; seconds."""
    begun, todo = time.perf_counter(), iter(jobs)

    async def place() -> None:
        for job in todo:
            await job()  # type: ignore[operator]

    await asyncio.gather(*(place() for _ in range(CONCURRENCY)))
    return time.perf_counter() - begun


async def agents(settings: Settings, recording: Recording, policy: Path) -> float:
    """Seconds that the agents take."""
    usage = Usage(NoUsage(), "rollout", "benchmark", "rollout", 1e9)
    engine = MeteredEngine(recording, usage, TokenBudget(settings.rollout.token_budget))  # type: ignore[arg-type]
    options = {"engine": engine, "tokenizer": ChatTokenizer.load(policy), "limits": Limits.of(settings.rollout)}
    todo = list(tasks(settings, 8))[:NUM_EPISODES]

    def job(task: object, member: int) -> object:
        return lambda: play(task, member, producer="benchmark", **options)  # type: ignore[arg-type]

    return await at_once([job(task, member) for task, member in todo])


async def bare(engine: VllmEngine, asked: dict[str, list[tuple[list[int], int]]]) -> float:
    """Seconds that the same requests take without agents."""

    async def episode(turns: list[tuple[list[int], int]]) -> None:
        for token_ids, number in turns:
            await engine.generate("", token_ids, max_new_tokens=number, temperature=1.0, stop_ids=(), seed=1)

    return await at_once([lambda turns=turns: episode(turns) for turns in asked.values()])


async def swaps(engine: VllmEngine, folders: Sequence[Path]) -> tuple[list[float], list[float], int]:
    """Stall and load of each of NUM_SWAPS swaps under load, in seconds; and how many requests were lost."""
    going, stalls, loads = True, list[float](), list[float]()
    lost = 0

    async def place(number: int) -> None:
        nonlocal lost
        while going:
            said = await asyncio.gather(
                engine.generate("", [number + 1] * 30, max_new_tokens=200, temperature=1.0, stop_ids=(), seed=number),
                return_exceptions=True,
            )
            lost += isinstance(said[0], BaseException)

    places = [asyncio.create_task(place(n)) for n in range(CONCURRENCY)]
    for number in range(NUM_SWAPS):
        await asyncio.sleep(0.3)
        await engine.load(number + 2, folders[number % 2])
        stalls.append(STALL.collect()[0].samples[0].value)
        loads.append(LOAD.collect()[0].samples[0].value)
    going = False
    await asyncio.gather(*places)
    return stalls, loads, lost


async def measure(folder: Path) -> dict[str, object]:
    """All figures."""
    policies = [write_policy(folder / f"v{n}", seed=n) for n in (1, 2)]
    for policy in policies:
        save_tokenizer(make_tokenizer([""]), policy)
    rollout = Rollout(engine="vllm", max_turn_tokens=TURN_TOKENS, episode_timeout_s=600, max_episodes=CONCURRENCY)
    families = tuple(Family(name=name) for name in ("add", "muladd", "chain", "larger"))
    settings = Settings(rollout=rollout, families=families)
    engine = VllmEngine(policies[0], 1, settings=Vllm(), log=folder / "vllm.log", max_tokens=480, threads=1)
    try:
        begun = time.perf_counter()
        await engine.score([1, 2, 3])
        start_s = time.perf_counter() - begun
        recording = Recording(engine)
        await agents(settings, Recording(engine), policies[0])  # warm
        agents_s = await agents(settings, recording, policies[0])
        bare_s = await bare(engine, recording.asked)
        stalls, loads, lost = await swaps(engine, policies)
    finally:
        await engine.close()
    num_tokens = sum(number for turns in recording.asked.values() for _, number in turns)
    extra_ms = [round((stall - load) * 1e3) for stall, load in zip(stalls, loads, strict=True)]
    return {
        "benchmark": "rollout",
        "start_s": round(start_s, 1),
        "episodes": len(recording.asked),
        "tokens": num_tokens,
        "agents_tokens_per_s": round(num_tokens / agents_s),
        "bare_tokens_per_s": round(num_tokens / bare_s),
        "ratio": round(bare_s / agents_s, 3),
        "elsewhere_s": round(agents_s - bare_s, 2),  # prompts, tokenizer, environments, rows
        "swap_load_ms": [round(load * 1e3) for load in loads],
        "swap_stall_beyond_load_ms": extra_ms,
        "lost": lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder)))
    print(json.dumps(figures, indent=2))
    if args.out:
        with open(args.out, "a") as file:
            file.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
