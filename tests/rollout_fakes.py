"""Small stand-ins for what a rollout service meets: an engine, a weight store, a producer; and episodes to send."""

import asyncio
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from inference.engines.base import EngineError, Generation
from infra.kafka.producer import OnDelivery
from schemas.errors import BrokerError, WeightStoreError
from schemas.ids import group_id, trajectory_id
from schemas.messages import File, Manifest, Probe, Task
from schemas.trajectory import Trajectory, WeightVersionSpan

NOW = datetime(2026, 11, 1, tzinfo=UTC)
PROBE_TOKENS = (1, 2, 3)


def task(draw: int = 0, *, family: str = "add", index: int = 0, group_size: int = 4, **fields: object) -> Task:
    """A task; `draw` tells its groups apart."""
    name = f"{family}/{index}"
    return Task.model_validate(
        {
            "group_id": group_id("test", name, draw),
            "group_size": group_size,
            "task_id": name,
            "family": family,
            "index": index,
            "environment": "calculator",
            "seed": 0,
            "draw": draw,
            "dispatched_at": NOW,
            "lease_until": NOW,
            **fields,
        }
    )


def episode(of: Task, index: int = 0, num_tokens: int = 3, **fields: object) -> Trajectory:
    """A finished episode of a task's group."""
    values: dict[str, object] = {
        "trajectory_id": trajectory_id(),
        "group_id": of.group_id,
        "group_index": index,
        "group_size": of.group_size,
        "task_id": of.task_id,
        "task_family": of.family,
        "environment": of.environment,
        "dispatch_weight_version": 1,
        "min_weight_version": 1,
        "max_weight_version": 1,
        "weight_version_spans": (WeightVersionSpan(0, num_tokens, 1),),
        "reward": 1.0,
        "token_ids": tuple(range(num_tokens)),
        "action_mask": (False,) * (num_tokens - 1) + (True,),
        "behavior_logprobs": (0.0,) * num_tokens,
        "num_prompt_tokens": num_tokens - 1,
        "num_generated_tokens": 1,
        "started_at": NOW,
        "finished_at": NOW,
    }
    return Trajectory(**values | fields)  # type: ignore[arg-type]


class FakeProducer:
    """Keeps what is sent. `answer` is called at each `poll` for each message that is still open."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes, dict[str, bytes]]] = []
        self.error: BrokerError | None = None
        self._open: list[OnDelivery] = []

    def send(
        self, topic: str, key: str, value: bytes, *, headers: dict[str, bytes], partition: int, on_delivery: OnDelivery
    ) -> None:
        self.sent.append((partition, value, headers))
        self._open.append(on_delivery)

    def poll(self) -> None:
        """Answer everything that is open."""
        answers, self._open = self._open, []
        for on_delivery in answers:
            on_delivery(self.error)


class FakeStore:
    """A weight store in memory: version -> logprobs of its probe; `broken` versions fail their hash when fetched."""

    def __init__(self, versions: dict[int, tuple[float, ...]]) -> None:
        self.published = versions
        self.broken: set[int] = set()
        self.is_down = False

    def versions(self) -> list[int]:
        if self.is_down:
            raise OSError("connection refused")
        return sorted(self.published)

    def manifest(self, version: int) -> Manifest:
        if self.is_down:
            raise OSError("connection refused")
        return manifest(version, self.published[version])

    def fetch(self, version: int, into: Path) -> Path:
        if version in self.broken:
            raise WeightStoreError(f"version {version}, file model.safetensors: SHA-256 differs")
        folder = into / f"v{version:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "logprobs.json").write_text(json.dumps(self.published[version]))
        return folder


def manifest(version: int, logprobs: tuple[float, ...] = (-1.0, -2.0)) -> Manifest:
    """A manifest whose fingerprint spells its version."""
    return Manifest(
        version=version,
        files=(File(name="model.safetensors", num_bytes=1, sha256="0" * 64),),
        fingerprint=f"{version:064x}",
        probe=Probe(token_ids=PROBE_TOKENS, logprobs=logprobs),
        created_at=NOW,
    )


class FakeEngine:
    """An engine that says what `say` says, and scores a probe as its folder tells it to.

    `lies` are versions that it pretends to load while it keeps the weights that it had.
    """

    def __init__(self, folder: Path, version: int) -> None:
        self.weight_version, self.busy_s, self.fault = version, 0.0, ""
        self.lies: set[int] = set()
        self.say: Callable[[str, Sequence[int]], Sequence[int]] = lambda session, token_ids: (0,)
        self._scores = _scores(folder)
        self.starts, self.num_loads = True, 0

    def die(self, reason: str, starts: bool = True) -> None:
        """From now on nothing is served, until `load` starts it again, if it `starts`."""
        self.fault, self.starts = reason, starts

    async def ready(self, session: str) -> None:
        """Nothing is shared."""

    async def generate(
        self,
        session: str,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int,
    ) -> Generation:
        await asyncio.sleep(0)
        said = (*self.say(session, token_ids), stop_ids[0])
        span = WeightVersionSpan(0, len(said), self.weight_version)
        return Generation(said, (-0.5,) * len(said), (span,), stopped=True)

    def release(self, session: str) -> None:
        """Nothing is kept."""

    async def load(self, version: int, folder: Path) -> None:
        self.num_loads += 1
        if not self.starts:
            raise EngineError(self.fault)
        self.fault = ""
        if not folder.exists():
            raise EngineError(f"no folder {folder}")
        self._scores = self._scores if version in self.lies else _scores(folder)
        self.weight_version = version

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return list(self._scores)

    async def close(self) -> None:
        """Nothing to stop."""


def _scores(folder: Path) -> list[float]:
    path = folder / "logprobs.json"
    return json.loads(path.read_text()) if path.exists() else [-1.0, -2.0]
