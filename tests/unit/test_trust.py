"""Tokens of weights that an engine could not prove earn no reward, whenever their episode ends."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from inference.serving import Server
from inference.weights import WeightFollower
from schemas.names import ErrorKind, Status
from schemas.settings import Settings
from schemas.trajectory import Trajectory, WeightVersionSpan
from tests.rollout_fakes import FakeEngine, FakeStore, episode, task

OLD, NEW = (-1.0, -2.0), (-1.5, -2.5)
UNTRUSTED = (Status.FAILED, ErrorKind.ENGINE, None)


class Slow(FakeEngine):
    """Scores probes once `may_score` is set."""

    def __init__(self, folder: Path, version: int) -> None:
        super().__init__(folder, version)
        self.scoring, self.may_score = asyncio.Event(), asyncio.Event()
        self.may_score.set()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        self.scoring.set()
        await self.may_score.wait()
        return await super().score(token_ids)


class Swap:
    """An engine that serves version 1 and begins, in `loaded`, to serve 2: proven only if it is not one of `lies`."""

    def __init__(self, folder: Path) -> None:
        self.store = FakeStore({1: OLD})
        self.server = Server(self.store, self._make, folder, "fp32")
        self.follower = WeightFollower(Settings(), self.store, self.server, retry_s=0)
        self.since_s = 0.0

    def _make(self, folder: Path, version: int) -> FakeEngine:
        self.engine = Slow(folder, version)
        return self.engine

    async def loaded(self, *lies: int) -> "asyncio.Task[bool]":
        """Version 2 is loaded and not proven yet; an episode began before."""
        await self.follower.follow()
        self.since_s = time.monotonic()
        self.engine.lies.update(lies)
        self.engine.scoring.clear()
        self.engine.may_score.clear()
        self.store.published[2] = NEW
        swapping = asyncio.create_task(self.follower.follow())
        await self.engine.scoring.wait()
        assert self.server.loaded == 2
        return swapping

    async def judged(self, *versions: int) -> Trajectory:
        """An episode that began before the swap and has a token of each of `versions`."""
        spans = tuple(WeightVersionSpan(i, i + 1, version) for i, version in enumerate(versions))
        return await self.server.trust.judged(episode(task(), weight_version_spans=spans), self.since_s)


def seen(trajectory: Trajectory) -> tuple[object, ...]:
    return trajectory.status, trajectory.error_kind, trajectory.reward


def test_an_episode_that_ends_during_a_proof_waits_for_it_and_shares_its_fate(tmp_path: Path) -> None:
    async def run(lies: bool) -> Trajectory:
        swap = Swap(tmp_path)
        swapping = await swap.loaded(*([2] if lies else []))
        before = await swap.judged(1)  # of the version before only: nothing to wait for
        assert before.reward == 1.0
        ended = asyncio.create_task(swap.judged(1, 2))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not ended.done()
        swap.engine.may_score.set()
        assert await swapping is not lies
        return await ended

    assert seen(asyncio.run(run(lies=True))) == UNTRUSTED
    sound = asyncio.run(run(lies=False))
    assert (sound.status, sound.reward) == (Status.COMPLETED, 1.0)


def test_a_later_proof_of_a_version_makes_the_tokens_of_its_first_load_no_better(tmp_path: Path) -> None:
    async def run() -> None:
        swap = Swap(tmp_path)
        swapping = await swap.loaded(2)
        swap.engine.may_score.set()
        assert not await swapping
        assert swap.follower.serving == 1
        assert seen(await swap.judged(1, 2)) == UNTRUSTED
        swap.engine.lies.clear()
        assert await swap.follower.follow()
        assert swap.follower.serving == 2
        assert seen(await swap.judged(1, 2)) == UNTRUSTED
        assert (await swap.judged(1)).reward == 1.0
        swap.since_s = time.monotonic()
        assert (await swap.judged(2)).reward == 1.0  # began under the load that was proven

    asyncio.run(run())


def test_who_stops_the_service_waits_for_no_proof_and_keeps_the_tokens(tmp_path: Path) -> None:
    async def run() -> Trajectory:
        swap = Swap(tmp_path)
        swapping = await swap.loaded()
        ended = asyncio.create_task(swap.judged(1, 2))
        await asyncio.sleep(0)
        ended.cancel()
        found = await ended
        swap.engine.may_score.set()
        await swapping
        return found

    found = asyncio.run(run())
    assert seen(found) == UNTRUSTED
    assert found.token_ids == (0, 1, 2)


def test_a_load_whose_proof_is_cut_short_is_no_proven_one(tmp_path: Path) -> None:
    async def run() -> Trajectory:
        swap = Swap(tmp_path)
        swapping = await swap.loaded()
        swapping.cancel()
        await asyncio.gather(swapping, return_exceptions=True)
        return await swap.judged(1, 2)

    assert seen(asyncio.run(run())) == UNTRUSTED


def test_an_engine_that_dies_and_fails_to_come_back_makes_what_it_had_sampled_no_worse(tmp_path: Path) -> None:
    async def run() -> Trajectory:
        swap = Swap(tmp_path)
        await swap.follower.follow()
        swap.since_s = time.monotonic()
        swap.engine.die("its server is gone", starts=False)
        await swap.follower.follow()
        assert swap.server.fault
        return await swap.judged(1)

    found = asyncio.run(run())
    assert (found.status, found.reward) == (Status.COMPLETED, 1.0)
