"""The parts of a rollout service and its verbs; `inference.serve` is the loop over them."""

import asyncio
import time
from typing import Any

from inference import agent
from inference.engines.registry import Wanted, make_engine
from inference.keeping import Keeper
from inference.metered import MeteredEngine, RefusingEngine, TokenBudget
from inference.orders import Orders
from inference.outbox import Outbox
from inference.packs import Packer
from inference.rollouts import Rollouts
from inference.sender import Sender
from inference.serving import Server, serving_precision
from inference.tasks import Tasks
from inference.tokenizer import ChatTokenizer
from inference.tools import Toolbox
from inference.weights import WeightFollower
from infra.kafka import Producer
from infra.telemetry import Telemetry, logger
from infra.turns import device_turn
from infra.usage import Usage
from infra.weights import WeightStore
from schemas.errors import BrokerError
from schemas.messages import Task
from schemas.names import Phase, Service, Status
from schemas.settings import Settings
from schemas.trajectory import Trajectory

_SEND_S = 0.01
_IDLE_S = 0.05
_REPORT_S = 0.2
_FLUSH_S = 5.0
_VERSION_WAIT_S = 5.0
"""How long an episode waits for the weight version that its task demands."""
_BROKEN_AFTER = 8
"""Engine failures in a row after which tasks are pulled only every _BROKEN_PAUSE_S, so that none is burnt."""
_BROKEN_PAUSE_S = 1.0


class RolloutService:
    """A rollout service. Stateless but for its outbox: add one or kill one, and nothing else changes."""

    def __init__(self, settings: Settings, telemetry: Telemetry, tasks: Tasks, orders: Orders, outbox: Outbox) -> None:
        rollout = settings.rollout
        self.settings, self.telemetry = settings, telemetry
        self.tasks, self.orders, self.outbox = tasks, orders, outbox
        self.log: Any = logger(Service.ROLLOUT, telemetry.instance)
        self.producer = Producer(settings.kafka, telemetry.instance)
        turn = device_turn(settings)
        self.usage = Usage(
            self.producer,
            Service.ROLLOUT,
            telemetry.instance,
            Phase.ROLLOUT,
            settings.telemetry.usage_s,
            own_s=turn.own_s if turn else None,
        )
        store = WeightStore.of(settings)
        engine = make_engine(rollout.engine, Wanted(settings, rollout.threads, telemetry.instance, turn))
        cache = settings.run.folder / "cache" / outbox.folder.name
        self.server = Server(store, engine, cache, serving_precision(settings, rollout.engine))
        self.budget = TokenBudget(rollout.token_budget)
        self.weights = WeightFollower(settings, store, self.server)
        self.packer = Packer(rollout.pack_linger_s)
        self.sender = Sender.of(settings, outbox, self.packer, self.producer)
        self.keeper = Keeper(self.sender.finished, outbox.folder)
        ahead = 2 * settings.loop.group_size  # a group waits while the next one is pulled, which takes milliseconds
        self.rollouts = Rollouts(self._play, self._finished, rollout.max_episodes, telemetry.instance, ahead)
        self._limits, self._toolbox = agent.Limits.of(rollout), Toolbox()
        self._tokenizer: ChatTokenizer | None = None
        for damage in outbox.damage:
            self.log.error("outbox damaged", damage=damage)

    async def follow_weights(self) -> None:
        """Swap to the newest version that can be proven."""
        if await self.weights.follow():
            self.log.info("weights", version=self.weights.serving, fingerprint=self.weights.fingerprint)
        await asyncio.sleep(self.settings.weights.poll_s)

    async def pull_tasks(self) -> None:
        """Take tasks while there is room, and begin their episodes. Behind the staleness bound, swap first."""
        if self.weights.lag > self.settings.loop.max_staleness:
            await self.weights.follow()
        await asyncio.to_thread(self.tasks.next, 0)  # joining takes seconds: it goes on while weights load
        num_groups = self._room // self.settings.loop.group_size
        if not num_groups or self.orders.pause or self._no_place() or self.weights.blocked():
            await self.rollouts.wait_for_end(_IDLE_S)
            return
        if self._engine_is_broken:
            await asyncio.sleep(_BROKEN_PAUSE_S)
        for task in await asyncio.to_thread(self.tasks.next, num_groups):
            if task.min_weight_version > self.weights.serving:  # of a version that the last look has not seen
                await self.weights.follow()
            self.packer.started(task.group_id, task.group_size)
            self.rollouts.start(task)

    async def send_episodes(self) -> None:
        """Pack what is ready and see it into Kafka."""
        self.rollouts.check()
        self.keeper.retry()
        self.sender.send()
        self.producer.poll()
        await asyncio.sleep(_SEND_S)

    async def hear_orders(self) -> None:
        """Take in new directives; before a version is known none can be judged, and nothing runs yet."""
        if self.weights.latest:
            await asyncio.to_thread(self.orders.poll, self.weights.latest, self.settings.loop.max_staleness)
        await asyncio.sleep(_REPORT_S)

    async def report(self) -> None:
        """Usage, totals, health; episodes that can no longer be used are stopped in passing."""
        if self.settings.rollout.stale_in_flight == "abort":
            self.rollouts.stop_older(self.weights.latest - self.settings.loop.max_staleness)
        self._account()
        self.telemetry.health(*self._health())
        await asyncio.sleep(_REPORT_S)

    async def drain(self) -> None:
        """End well: let episodes finish, stop those that do not, send everything that Kafka takes in time."""
        left = await self.rollouts.drain(self.settings.rollout.drain_s)
        deadline = time.monotonic() + _FLUSH_S
        while (self.keeper.fault or not self.outbox.is_empty) and time.monotonic() < deadline:
            self.keeper.retry()
            self.sender.send(force=True)
            self.producer.poll()
            await asyncio.sleep(_SEND_S)
        self._account(force=True)
        self.log.info("drained", not_begun=left, everything_sent=self.outbox.is_empty)
        self.keeper.close()

    async def close(self) -> None:
        """Free everything. What Kafka has not taken stays in the outbox."""
        await self.server.close()
        try:
            self.producer.flush(1.0)
        except BrokerError as error:
            self.log.warning("kafka is away", error=str(error))
        self.sender.close()
        self.outbox.close()
        self.orders.close()
        await asyncio.to_thread(self.tasks.close)  # last: without a broker it takes long

    async def _play(self, task: Task, index: int, live: agent.Live) -> Trajectory:
        demanded = max(1, task.min_weight_version, self.orders.min_weight_version)
        served = await self.weights.at_least(demanded, _VERSION_WAIT_S)
        loaded, folder = self.server.current
        self._tokenizer = self._tokenizer or ChatTokenizer.load(folder)
        reason = f"the task demands weight version {demanded}; {self.weights.serving} is served: {self._health()[1]}"
        engine = MeteredEngine(loaded, self.usage, self.budget)
        if not served:
            engine = RefusingEngine(loaded, self.usage, self.budget, reason)
        begun_s = time.monotonic()
        trajectory = await agent.play(
            task,
            index,
            engine=engine,
            tokenizer=self._tokenizer,
            toolbox=self._toolbox,
            limits=self._limits,
            producer=self.telemetry.instance,
            live=live,
        )
        live.oldest = None  # it has ended, and can no longer be stopped as stale
        return await self.server.trust.judged(trajectory, begun_s)

    def _finished(self, trajectory: Trajectory) -> None:
        self.keeper.finished(trajectory)
        failed = int(trajectory.status == Status.FAILED)
        self.usage.add(tokens=trajectory.num_generated_tokens, episodes=1, failed=failed)

    def _account(self, force: bool = False) -> None:
        self.outbox.sync()
        self.usage.version(self.weights.serving)
        self.usage.produced(self.outbox.id, self.outbox.num_trajectories, self.outbox.num_tokens)
        try:
            self.usage.tick(force)
        except BrokerError as error:
            self.log.warning("usage not sent", error=str(error))

    @property
    def _room(self) -> int:
        """Episodes that could begin at once; none while requests wait for tokens of the budget."""
        return 0 if self.budget.is_spent else self.rollouts.room

    @property
    def _engine_is_broken(self) -> bool:
        return self.rollouts.failed_in_a_row >= _BROKEN_AFTER

    def _no_place(self) -> str:
        return self.keeper.fault or self.sender.no_place

    def _health(self) -> tuple[bool, str]:
        """Whether all is well, and what is to be known."""
        troubles = (
            self.weights.blocked(),
            self.tasks.error,
            self.sender.unsent,
            self._no_place(),
            f"the engine failed {self.rollouts.failed_in_a_row} times in a row" if self._engine_is_broken else "",
            self.weights.warning(),
        )
        if trouble := next(filter(None, troubles), ""):
            return False, trouble
        if self.orders.pause:
            return True, f"paused by directive {self.orders.directive_id}"
        return True, f"serving version {self.weights.serving}, fingerprint {self.weights.fingerprint[:12]}"
