"""Many episodes in flight, each on its own: none waits for another, and each leaves exactly one row."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime

from prometheus_client import Counter, Gauge

from inference.agent import Live
from inference.endings import MAX_ERROR, STALE
from schemas.ids import trajectory_id
from schemas.messages import Task
from schemas.names import ErrorKind, Status, StopReason
from schemas.trajectory import Trajectory

EPISODES = Counter("lagoon_episodes", "Episodes that ended", ["status"])
ACTION_TOKENS = Counter("lagoon_action_tokens", "Tokens sampled in episodes that ended")
IN_FLIGHT = Gauge("lagoon_episodes_in_flight", "Episodes running or waiting for a place")

STOPPED = Counter("lagoon_episodes_stopped_stale", "Episodes stopped because nobody could train on them any more")

Play = Callable[[Task, int, Live], Awaitable[Trajectory]]
"""(task, group_index, live) -> its trajectory. When it is cancelled it returns what there is, as a failed one."""


class Rollouts:
    """Runs the members of groups, `max_episodes` at a time; `ahead` more may wait, so that no place becomes empty.

    `finished` is called once for every episode that began; `failed_in_a_row` counts engine failures since the last
    episode without one.
    """

    def __init__(
        self, play: Play, finished: Callable[[Trajectory], None], max_episodes: int, producer: str, ahead: int = 0
    ) -> None:
        self.failed_in_a_row = 0
        self._play, self._finished, self._producer = play, finished, producer
        self._most = max_episodes + ahead
        self._places = asyncio.Semaphore(max_episodes)
        self._members: set[asyncio.Task[None]] = set()
        self._begun: dict[asyncio.Task[None], Live] = {}
        self._end = asyncio.Event()
        self._error: Exception | None = None

    @property
    def num_running(self) -> int:
        """Episodes that run or wait for a place."""
        return len(self._members)

    @property
    def room(self) -> int:
        """Episodes that may be started: at once, or as the next ones."""
        return max(0, self._most - len(self._members))

    async def wait_for_end(self, limit_s: float) -> None:
        """Wait until an episode ends, up to `limit_s`."""
        self._end.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._end.wait(), limit_s)

    def start(self, task: Task) -> None:
        """Begin every member of a group, as places become free."""
        for index in range(task.group_size):
            member = asyncio.create_task(self._member(task, index), name=f"{task.group_id}/{index}")
            self._members.add(member)
            member.add_done_callback(self._ended)
        IN_FLIGHT.set(len(self._members))

    async def drain(self, limit_s: float) -> int:
        """Wait up to `limit_s` for the episodes that run, then stop them; each still leaves its row.

        Members that had not begun are left to the lease of their task. Returns how many those were.
        """
        waiting = self._members - self._begun.keys()
        for member in waiting:
            member.cancel()
        if self._begun:
            await asyncio.wait(self._begun, timeout=limit_s)
        for member in self._begun:
            member.cancel()
        await asyncio.gather(*self._members, return_exceptions=True)
        self.check()
        return len(waiting)

    def stop_older(self, version: int) -> int:
        """Stop the episodes with tokens of versions below `version`, each with its row; returns how many."""
        stale = [m for m, live in self._begun.items() if live.oldest is not None and live.oldest < version]
        for member in stale:
            self._begun[member].oldest = None  # once is enough
            member.cancel(STALE)
        STOPPED.inc(len(stale))
        return len(stale)

    def check(self) -> None:
        """Raise what `finished` raised, if it ever did: a finished episode could not be kept."""
        if self._error is not None:
            raise self._error

    async def _member(self, task: Task, index: int) -> None:
        async with self._places:
            member = asyncio.current_task()
            assert member is not None  # noqa: S101 - this is a coroutine of a task
            live = self._begun[member] = Live()
            try:
                self._count(await self._episode(task, index, live))
            except Exception as error:  # not kept: raised by `check`, which stops the service
                self._error = error
            finally:
                del self._begun[member]

    async def _episode(self, task: Task, index: int, live: Live) -> Trajectory:
        started_at = datetime.now(UTC)
        try:
            return await self._play(task, index, live)
        except asyncio.CancelledError:
            return self._lost(task, index, started_at, ErrorKind.SHUTDOWN, "the service was stopped")
        except Exception as error:  # whatever broke: the episode leaves a row, and others go on
            return self._lost(task, index, started_at, ErrorKind.ENVIRONMENT, f"{type(error).__name__}: {error}")

    def _count(self, trajectory: Trajectory) -> None:
        EPISODES.labels(trajectory.status).inc()
        ACTION_TOKENS.inc(trajectory.num_generated_tokens)
        engine_failed = trajectory.error_kind == ErrorKind.ENGINE
        self.failed_in_a_row = self.failed_in_a_row + 1 if engine_failed else 0
        self._finished(trajectory)

    def _ended(self, member: asyncio.Task[None]) -> None:
        self._members.discard(member)
        self._end.set()
        IN_FLIGHT.set(len(self._members))

    def _lost(self, task: Task, index: int, started_at: datetime, kind: ErrorKind, error: str) -> Trajectory:
        """The row of an episode that could not make its own."""
        return Trajectory(
            trajectory_id=trajectory_id(),
            group_id=task.group_id,
            group_index=index,
            group_size=task.group_size,
            task_id=task.task_id,
            task_family=task.family,
            environment=task.environment,
            attempt=task.attempt,
            parent_id=task.branch.parent_id if task.branch else None,
            origin=task.origin,
            producer=self._producer,
            dispatch_weight_version=task.min_weight_version,
            min_weight_version=task.min_weight_version,
            max_weight_version=task.min_weight_version,
            status=Status.FAILED,
            stop_reason=StopReason.SHUTDOWN if kind == ErrorKind.SHUTDOWN else StopReason.ERROR,
            error_kind=kind,
            error=error[:MAX_ERROR],
            started_at=started_at,
            finished_at=datetime.now(UTC),
        )
