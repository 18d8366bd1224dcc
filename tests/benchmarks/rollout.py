"""A rollout service on a vLLM server against a bare load generator on the same server, and what a weight swap costs.

The generator replays the very requests of the service's episodes: same contexts, same numbers of tokens, in the same
order, as many at once, and nothing else. The service is a process of its own, with tasks and episodes in a real Kafka;
it stands still while the generator works. They take turns, and the prefix cache is emptied before each. Both are timed
from the start of the first episode to the end of the last one. `places` and `bare_places` say what the places for
episodes did meanwhile: they were with the engine, with environment and tokenizer, or empty. The end, where fewer
episodes are left than there are places, is in both.

OMP_NUM_THREADS=1 python -m tests.benchmarks.rollout [--model DIR] [--rounds 3] [--out bench.jsonl]

First with a policy of the demo's size and random weights, for which a weight swap is measured too; it is so small that
server, service and broker contend for two cores. Then with SmolLM2-135M, or with the Hugging Face folder DIR alone, in
bfloat16 and with fewer tokens, since such a model is slow on a CPU.
"""

import argparse
import asyncio
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.engines.vllm.client import Client
from inference.engines.vllm.engine import LOAD, STALL, VllmEngine
from inference.engines.vllm.process import LocalServer
from infra.fingerprints import fingerprint_file
from infra.kafka import Follower
from infra.weights import WeightStore, describe
from schemas.messages import Manifest, UsageInterval
from schemas.settings import Kafka, Settings, Vllm
from schemas.topics import USAGE
from schemas.trajectory import Trajectory
from tests.benchmarks.lines import tell
from tests.conftest import running_broker
from tests.policies import smollm2, write_policy
from tests.rollout_fakes import NOW
from tests.rollout_process import GROUP_SIZE, Service, prepare_rollouts, received, send_tasks, until

NUM_SWAPS = 5
MAX_TOKENS = 480


@dataclass(frozen=True)
class Load:
    """How much there is to do.

    Attributes:
        places: Episodes at once.
        num_groups: Groups of a round.
        turn_tokens: Most tokens of a turn.
    """

    places: int
    num_groups: int
    turn_tokens: int

    @property
    def num_episodes(self) -> int:
        """Episodes of a round."""
        return self.num_groups * GROUP_SIZE


TINY, LARGE = Load(32, 80, 96), Load(16, 16, 32)


def play(kafka: Kafka, load: Load, number: int) -> list[Trajectory]:
    """The episodes of round `number`, once they are all in Kafka.

    Until the service says that it has produced them nothing is read but that: whoever waits would otherwise be a load.
    """
    wanted, rows = load.num_episodes * (number + 1), list[Trajectory]()

    def all_there() -> bool:
        rows[:] = [row for message in received(kafka) for row in message.rows]
        return len(rows) >= wanted

    with closing(Follower(kafka, USAGE.name, UsageInterval, "bench")) as follower:
        send_tasks(kafka, range(number * load.num_groups, (number + 1) * load.num_groups))
        until(lambda: any((said.produced_trajectories or 0) >= wanted for said in follower.poll()))
    until(all_there)
    return sorted(rows, key=lambda row: row.started_at)[-load.num_episodes :]


def account(spans: Sequence[tuple[float, float]], places: int, environment_s: float = 0.0) -> dict[str, float]:
    """Seconds from the first start to the last end, and what the places did meanwhile: shares that sum to 1.

    Args:
        spans: Start and end of each episode, in seconds.
        places: Episodes at once.
        environment_s: Seconds of all episodes that were not with the engine.
    """
    wall_s = max(end for _, end in spans) - min(start for start, _ in spans)
    played_s = sum(end - start for start, end in spans)
    places_s = wall_s * places
    return {
        "wall_s": wall_s,
        "engine": (played_s - environment_s) / places_s,
        "environment": environment_s / places_s,
        "empty": 1 - played_s / places_s,
    }


async def bare(client: Client, places: int, rows: Sequence[Trajectory]) -> list[tuple[float, float]]:
    """Start and end of each episode where there is no service, but the same requests."""
    turns = [[(r.token_ids[: t.action_start], t.action_end - t.action_start) for t in r.turns] for r in rows]
    todo, spans = iter(turns), list[tuple[float, float]]()

    async def place() -> None:
        for number, episode in enumerate(todo):
            begun_s = time.perf_counter()
            for token_ids, length in episode:
                sampling = {"max_tokens": length, "temperature": 1.0, "ignore_eos": True, "seed": number}
                await client.generate([*token_ids], sampling)
            spans.append((begun_s, time.perf_counter()))

    await asyncio.gather(*(place() for _ in range(places)))
    return spans


async def swaps(engine: VllmEngine, folders: Sequence[Path]) -> dict[str, Any]:
    """Stall and load of each of NUM_SWAPS swaps under load, and how many requests were lost.

    The stall is counted from the request to pause, so it holds the step that the server still ends.
    """
    going, stalls, loads = True, list[float](), list[float]()
    lost = 0

    async def place(number: int) -> None:
        nonlocal lost
        while going:
            said = await asyncio.gather(
                engine.generate("", [number + 1] * 30, max_new_tokens=200, temperature=1.0, stop_ids=(), seed=number),
                return_exceptions=True,
            )
            lost += isinstance(said[0], BaseException) or len(said[0].token_ids) != 200

    places = [asyncio.create_task(place(n)) for n in range(TINY.places)]
    for number in range(NUM_SWAPS):
        await asyncio.sleep(0.3)
        await engine.load(number + 2, folders[number % 2])
        stalls.append(STALL.collect()[0].samples[0].value)
        loads.append(LOAD.collect()[0].samples[0].value)
    going = False
    await asyncio.gather(*places)
    return {
        "swap_load_ms": [round(load * 1e3) for load in loads],
        "swap_stall_beyond_load_ms": [round((stall - load) * 1e3) for stall, load in zip(stalls, loads, strict=True)],
        "lost": lost,
    }


async def against_bare(settings: Settings, load: Load, rounds: int) -> dict[str, Any]:
    """Medians over `rounds` of each."""
    client, service = Client(settings.vllm.url), Service(settings)
    tokens, services, alone = list[int](), list[dict[str, float]](), list[dict[str, float]]()
    try:
        await asyncio.to_thread(until, lambda: service.health()[0])
        for number in range(rounds + 1):  # the first one is to warm up
            await client.forget()
            worked = service.processor_s
            rows = await asyncio.to_thread(play, settings.kafka, load, number)
            worked = service.processor_s - worked
            service.process.send_signal(signal.SIGSTOP)
            await client.forget()
            spans = await bare(client, load.places, rows)
            service.process.send_signal(signal.SIGCONT)
            if number:
                tokens.append(sum(r.num_generated_tokens for r in rows))
                services.append(_account(rows, load.places) | {"worked_s": worked})
                alone.append(account(spans, load.places))
    finally:
        service.kill()
        await client.close()
    ratios = [b["wall_s"] / s["wall_s"] for b, s in zip(alone, services, strict=True)]
    served, bare_ = _middle(services), _middle(alone)
    return {
        "value": round(statistics.median(tokens) / served["wall_s"]),
        "unit": "tokens/s",
        "reference": round(statistics.median(tokens) / bare_["wall_s"]),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "episodes": load.num_episodes,
        "tokens": statistics.median(tokens),
        "places": {name: round(served[name], 3) for name in ("engine", "environment", "empty")},
        "bare_places": {name: round(bare_[name], 3) for name in ("engine", "empty")},
        "processor_ms_per_episode": round(served["worked_s"] / load.num_episodes * 1e3, 2),
    }


def _account(rows: Sequence[Trajectory], places: int) -> dict[str, float]:
    spans = [(row.started_at.timestamp(), row.finished_at.timestamp()) for row in rows]
    return account(spans, places, sum(row.environment_s for row in rows))


def _middle(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


async def measure(folder: Path, brokers: str, rounds: int, model: Path | None) -> dict[str, Any]:
    """All figures."""
    kafka, load = Kafka(brokers=brokers, topic_prefix="bench.", partitions=4), LARGE if model else TINY
    settings, policy = prepare_rollouts(folder, kafka), model or folder / "policy"
    if model:
        WeightStore.of(settings).publish(model, _manifest(model))
    vllm = Vllm(dtype="bfloat16" if model else "float32")
    server = LocalServer(vllm, folder / "vllm.log", max_tokens=MAX_TOKENS, threads=1)
    begun, url = time.perf_counter(), server.start(policy)
    vllm = vllm.model_copy(update={"url": url})
    rollout = {
        "engine": "vllm",
        "max_turn_tokens": load.turn_tokens,
        "max_tokens": MAX_TOKENS,
        "max_episodes": load.places,
        "episode_timeout_s": 600,
    }
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update=rollout), "vllm": vllm})
    engine = VllmEngine(policy, 1, settings=vllm, log=folder / "unused", max_tokens=MAX_TOKENS, threads=1)
    try:
        await engine.score([1, 2, 3])
        figures: dict[str, Any] = {"name": f"rollout service, {model.name if model else 'tiny policy'}"}
        figures |= {"start_s": round(time.perf_counter() - begun, 1)}
        figures |= await against_bare(settings, load, rounds)
        return figures | ({} if model else await swaps(engine, [policy, write_policy(folder / "other", seed=2)]))
    finally:
        await engine.close()
        server.stop()


def _manifest(folder: Path) -> Manifest:
    """Of version 2, without a probe: what is measured is its tokens a second."""
    fingerprint = fingerprint_file(folder / "model.safetensors")
    return Manifest(version=2, files=describe(folder), fingerprint=fingerprint, created_at=NOW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for model in [args.model] if args.model else [None, smollm2()]:
        with tempfile.TemporaryDirectory() as name, running_broker(Path(name)) as brokers:
            tell(asyncio.run(measure(Path(name), brokers, args.rounds, model)), args.out)


if __name__ == "__main__":
    main()
