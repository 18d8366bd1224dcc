"""A rollout service on a vLLM server against a bare load generator on the same server, and what a weight swap costs.

The generator replays the very requests of the service's episodes: same contexts, same numbers of tokens, as many at
once, and nothing else. The service is a process of its own, with tasks and episodes in a real Kafka; it stands still
while the generator works. They take turns, and the prefix cache is emptied before each. `places` says what the
service's places for episodes did: they were with the engine, with environment and tokenizer, or empty.

OMP_NUM_THREADS=1 python -m tests.benchmarks.rollout [--rounds 3] [--out bench.jsonl]
"""

import argparse
import asyncio
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference.engines.vllm.client import Client
from inference.engines.vllm.engine import LOAD, STALL, VllmEngine
from inference.engines.vllm.process import LocalServer
from schemas.settings import Kafka, Settings, Vllm
from schemas.trajectory import Trajectory
from tests.benchmarks.lines import tell
from tests.conftest import running_broker
from tests.policies import write_policy
from tests.rollout_process import GROUP_SIZE, Service, prepare_rollouts, received, send_tasks, until

CONCURRENCY = 32
NUM_GROUPS = 80
TURN_TOKENS = 96
NUM_SWAPS = 5
MAX_TOKENS = 480


def play(kafka: Kafka, number: int) -> list[Trajectory]:
    """The episodes of round `number`, once they are all in Kafka."""
    wanted, rows = NUM_GROUPS * GROUP_SIZE * (number + 1), list[Trajectory]()

    def all_there() -> bool:
        rows[:] = [row for message in received(kafka) for row in message.rows]
        return len(rows) >= wanted

    send_tasks(kafka, range(number * NUM_GROUPS, (number + 1) * NUM_GROUPS))
    until(all_there)
    return sorted(rows, key=lambda row: row.started_at)[-NUM_GROUPS * GROUP_SIZE :]


def account(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Seconds from the first start to the last end, and what the places did meanwhile: shares that sum to 1."""
    wall_s = (max(r.finished_at for r in rows) - min(r.started_at for r in rows)).total_seconds()
    played_s = sum((r.finished_at - r.started_at).total_seconds() for r in rows)
    environment_s = sum(r.environment_s for r in rows)
    places_s = wall_s * CONCURRENCY
    return {
        "wall_s": wall_s,
        "engine": (played_s - environment_s) / places_s,
        "environment": environment_s / places_s,
        "empty": 1 - played_s / places_s,
    }


async def bare(client: Client, rows: Sequence[Trajectory]) -> float:
    """Seconds that the same requests take without a service."""
    turns = [[(r.token_ids[: t.action_start], t.action_end - t.action_start) for t in r.turns] for r in rows]
    todo, begun = iter(turns), time.perf_counter()

    async def place() -> None:
        for number, episode in enumerate(todo):
            for token_ids, length in episode:
                sampling = {"max_tokens": length, "temperature": 1.0, "ignore_eos": True, "seed": number}
                await client.generate([*token_ids], sampling)

    await asyncio.gather(*(place() for _ in range(CONCURRENCY)))
    return time.perf_counter() - begun


async def swaps(engine: VllmEngine, folders: Sequence[Path]) -> tuple[list[float], list[float], int]:
    """Stall and load of each of NUM_SWAPS swaps under load, in seconds; and how many requests were lost.

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

    places = [asyncio.create_task(place(n)) for n in range(CONCURRENCY)]
    for number in range(NUM_SWAPS):
        await asyncio.sleep(0.3)
        await engine.load(number + 2, folders[number % 2])
        stalls.append(STALL.collect()[0].samples[0].value)
        loads.append(LOAD.collect()[0].samples[0].value)
    going = False
    await asyncio.gather(*places)
    return stalls, loads, lost


async def against_bare(settings: Settings, rounds: int) -> dict[str, Any]:
    """Medians over `rounds` of each."""
    client, service = Client(settings.vllm.url), Service(settings)
    tokens, services, alone = list[int](), list[dict[str, float]](), list[float]()
    try:
        await asyncio.to_thread(until, lambda: service.health()[0])
        for number in range(rounds + 1):  # the first one is to warm up
            await client.forget()
            worked = service.processor_s
            rows = await asyncio.to_thread(play, settings.kafka, number)
            worked = service.processor_s - worked
            service.process.send_signal(signal.SIGSTOP)
            await client.forget()
            seconds = await bare(client, rows)
            service.process.send_signal(signal.SIGCONT)
            if number:
                tokens.append(sum(r.num_generated_tokens for r in rows))
                services.append(account(rows) | {"worked_s": worked})
                alone.append(seconds)
    finally:
        service.kill()
        await client.close()
    middle = {name: statistics.median(s[name] for s in services) for name in services[0]}
    return {
        "episodes": NUM_GROUPS * GROUP_SIZE,
        "tokens": statistics.median(tokens),
        "service_tokens_per_s": round(statistics.median(tokens) / middle["wall_s"]),
        "bare_tokens_per_s": round(statistics.median(tokens) / statistics.median(alone)),
        "ratio": round(statistics.median(b / s["wall_s"] for b, s in zip(alone, services, strict=True)), 3),
        "ratios": [round(b / s["wall_s"], 3) for b, s in zip(alone, services, strict=True)],
        "places": {name: round(middle[name], 3) for name in ("engine", "environment", "empty")},
        "processor_ms_per_episode": round(middle["worked_s"] / (NUM_GROUPS * GROUP_SIZE) * 1e3, 2),
    }


async def measure(folder: Path, brokers: str, rounds: int) -> dict[str, Any]:
    """All figures."""
    kafka = Kafka(brokers=brokers, topic_prefix="bench.", partitions=4)
    values = prepare_rollouts(folder, kafka).model_dump()
    policies = [folder / "policy", write_policy(folder / "other", seed=2)]
    server = LocalServer(Vllm(), folder / "vllm.log", max_tokens=MAX_TOKENS, threads=1)
    begun, url = time.perf_counter(), server.start(policies[0])
    values["rollout"] |= {
        "engine": "vllm",
        "max_turn_tokens": TURN_TOKENS,
        "max_tokens": MAX_TOKENS,
        "max_episodes": CONCURRENCY,
        "episode_timeout_s": 600,
    }
    settings = Settings.model_validate(values | {"vllm": {"url": url}})
    engine = VllmEngine(policies[0], 1, settings=settings.vllm, log=folder / "unused", max_tokens=MAX_TOKENS, threads=1)
    try:
        await engine.score([1, 2, 3])
        start_s = time.perf_counter() - begun
        figures = await against_bare(settings, rounds)
        stalls, loads, lost = await swaps(engine, policies)
    finally:
        await engine.close()
        server.stop()
    extra_ms = [round((stall - load) * 1e3) for stall, load in zip(stalls, loads, strict=True)]
    return {
        "benchmark": "rollout",
        "start_s": round(start_s, 1),
        **figures,
        "swap_load_ms": [round(load * 1e3) for load in loads],
        "swap_stall_beyond_load_ms": extra_ms,
        "lost": lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, running_broker(Path(name)) as brokers:
        figures = asyncio.run(measure(Path(name), brokers, args.rounds))
    tell(figures, args.out)


if __name__ == "__main__":
    main()
