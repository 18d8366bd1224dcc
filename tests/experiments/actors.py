"""The acting half of the loop: real agents on the real embedded engine, at a weight version of choice."""

import asyncio
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from inference.agent import Limits, play
from inference.engines.torch_engine import TorchEngine
from inference.scoring import by_family, tally, wilson
from inference.tokenizer import ChatTokenizer
from inference.tools import Toolbox
from schemas.messages import EvalResult, Task
from schemas.settings import Settings
from schemas.trajectory import Trajectory


class Actors:
    """Plays whole groups. `policy` is the folder of version 1."""

    def __init__(self, settings: Settings, policy: Path):
        rollout = settings.rollout
        self._engine = TorchEngine(policy, 1, max_sessions=rollout.max_episodes, max_tokens=rollout.max_tokens)
        self._tokenizer, self._toolbox = ChatTokenizer.load(policy), Toolbox()
        self._limits, self._places = Limits.of(rollout), asyncio.Semaphore(rollout.max_episodes)

    async def play(self, tasks: Sequence[Task], version: int, folder: Path) -> list[Trajectory]:
        """All members of the groups `tasks`, sampled by the weights in `folder`, stamped with `version`."""
        if self._engine.weight_version != version:
            await self._engine.load(version, folder)
        members = [(task, index) for task in tasks for index in range(task.group_size)]
        return await asyncio.gather(*(self._member(task, index) for task, index in members))

    async def close(self) -> None:
        """Let go of the engine."""
        await self._engine.close()

    async def _member(self, task: Task, index: int) -> Trajectory:
        async with self._places:
            return await play(
                task,
                index,
                engine=self._engine,
                tokenizer=self._tokenizer,
                toolbox=self._toolbox,
                limits=self._limits,
                producer="experiment",
            )


def judged(version: int, episodes: Sequence[Trajectory], settings: Settings) -> EvalResult:
    """The evaluation that held-out `episodes` of `version` come to."""
    success, now = settings.loop.success_reward, datetime.now(UTC)
    counts = tally(episodes, success)
    low, high = wilson(counts.successes, counts.num_scored)
    return EvalResult(
        eval_id=str(uuid.uuid4()),
        kind="light",
        requested_version=version,
        start_version=version,
        end_version=version,
        score=counts.score,
        low=low,
        high=high,
        num_scored=counts.num_scored,
        num_unscored=counts.num_unscored,
        families=by_family(episodes, success),
        started_at=now,
        finished_at=now,
    )
