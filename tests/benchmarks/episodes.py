"""Whole episodes per second, agents and embedded engine in one process, and the score of a policy on held-out tasks.

OMP_NUM_THREADS=1 python -m tests.benchmarks.episodes --policy DIR --config FILE
"""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from inference.agent import Limits, play
from inference.engines.torch_engine import TorchEngine
from inference.tokenizer import ChatTokenizer
from inference.tools import Toolbox
from schemas.messages import Task
from schemas.settings import Settings, load
from schemas.trajectory import Trajectory


def tasks(settings: Settings, group_size: int) -> Iterator[tuple[Task, int]]:
    """Every held-out task, `group_size` times."""
    now = datetime.now(UTC)
    for family in settings.families:
        for index in range(family.num_train, family.num_tasks):
            fields = {"group_size": group_size, "seed": settings.run.seed, "dispatched_at": now, "lease_until": now}
            task = Task.of(family, index, 0, run="benchmark", **fields)
            yield from ((task, member) for member in range(group_size))


async def roll_out(settings: Settings, policy: Path, group_size: int) -> tuple[list[Trajectory], TorchEngine]:
    """Play them all, `rollout.max_episodes` at a time."""
    limits, tokenizer = Limits.of(settings.rollout), ChatTokenizer.load(policy)
    engine = TorchEngine(policy, 1, max_sessions=settings.rollout.max_episodes, max_tokens=settings.rollout.max_tokens)
    todo, done, toolbox = tasks(settings, group_size), list[Trajectory](), Toolbox()

    async def place() -> None:
        for task, member in todo:
            options = {"engine": engine, "tokenizer": tokenizer, "toolbox": toolbox, "limits": limits}
            done.append(await play(task, member, producer="benchmark", **options))

    await asyncio.gather(*(place() for _ in range(settings.rollout.max_episodes)))
    await engine.close()
    return done, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--group", type=int, default=4)
    known, rest = parser.parse_known_args()
    settings = load(known.config, rest)
    begun = time.perf_counter()
    done, engine = asyncio.run(roll_out(settings, known.policy, known.group))
    took = time.perf_counter() - begun
    num_tokens = sum(len(t.token_ids) for t in done)
    print(
        f"{len(done)} episodes in {took:.2f} s: {len(done) / took:,.0f} episodes/s, {num_tokens / took:,.0f} tokens/s"
    )
    print(f"engine busy {engine.busy_s / took:.2f} of the time")
    print("ended", dict(Counter(str(t.stop_reason) for t in done)), dict(Counter(str(t.error_kind) for t in done)))
    scored = [(t.task_family, t.reward) for t in done if t.reward is not None]
    for family in settings.families:
        rewards = [r for name, r in scored if name == family.name]
        print(f"{family.name:10s} {sum(rewards) / len(rewards):.3f}")
    print(f"held-out   {sum(r for _, r in scored) / len(scored):.3f}")


if __name__ == "__main__":
    main()
