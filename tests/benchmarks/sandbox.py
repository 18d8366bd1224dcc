"""Short programs a second: in warm sandboxes, and in one that is started for each program.

python -m tests.benchmarks.sandbox [--seconds 3] [--out bench.jsonl]

Each core has a sandbox. Warm and cold take turns, second by second, so that whatever else the machine does slows both.
`graded` is a function with three tests: a checker's process beside the program's.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inference.sandbox.limits import Limits
from inference.sandbox.sandbox import Sandbox
from tests.benchmarks.lines import keep

LIMITS = Limits(wall_s=60)
CORES = len(os.sched_getaffinity(0))
PROGRAM = "print(sum(range(100)))"
TESTS = [(f"of-{n}", f"assert candidate({n}) == {n + 1}") for n in range(3)]


async def rate(one: Callable[[], Awaitable[bool]], seconds: float, at_once: int) -> float:
    """Programs a second."""
    until, count = time.perf_counter() + seconds, 0
    begun = time.perf_counter()

    async def place() -> None:
        nonlocal count
        while time.perf_counter() < until:
            assert await one()
            count += 1

    await asyncio.gather(*(place() for _ in range(at_once)))
    return count / (time.perf_counter() - begun)


async def measure(seconds: int) -> dict[str, float]:
    """Mean rates by kind."""
    warm, threads = Sandbox(CORES), ThreadPoolExecutor(CORES)
    warm.probe()

    async def script() -> bool:
        return (await warm.run(PROGRAM, limits=LIMITS)).stdout == "4950\n"

    async def graded() -> bool:
        return all(v.passed for v in (await warm.grade("def f(x): return x + 1", "f", TESTS, limits=LIMITS)).values())

    async def cold() -> bool:
        await asyncio.get_running_loop().run_in_executor(threads, _once)
        return True

    kinds: dict[str, Callable[[], Awaitable[bool]]] = {"warm": script, "graded": graded, "cold": cold}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(seconds):
        for kind, one in kinds.items():
            rates[kind].append(await rate(one, 1, CORES * 2))
    warm.close()
    return {kind: sum(values) / len(values) for kind, values in rates.items()}


def _once() -> None:
    """One program in a sandbox of its own."""
    sandbox = Sandbox(1)
    sandbox.probe()
    sandbox.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures = asyncio.run(measure(options.seconds))
    for kind, value in figures.items():
        print(f"{kind:8}{value:8.0f} programs/s")
    ratio = figures["warm"] / figures["cold"]
    print(f"{'ratio':8}{ratio:8.1f}   (warm to cold, {CORES} cores)")
    line = {"name": "sandbox", "value": round(figures["warm"]), "unit": "programs/s"}
    keep(options.out, line | {"reference": round(figures["cold"]), "ratio": round(ratio, 2)})


if __name__ == "__main__":
    main()
