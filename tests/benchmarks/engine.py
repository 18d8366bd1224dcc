"""Tokens per second of the embedded engine on the tiny policy, episodes joining and leaving all the time.

OMP_NUM_THREADS=1 python -m tests.benchmarks.engine [--rows 1 16 64 128 256] [--out bench.jsonl]
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from inference.engines.torch_engine import TorchEngine
from tests.benchmarks.lines import keep
from tests.policies import VOCABULARY, write_policy

PROMPT, OBSERVATION, ACTION, TURNS = 18, 11, 10, 2


async def episode(engine: TorchEngine, name: str, rng: random.Random) -> int:
    """One episode of TURNS turns; returns its number of tokens."""
    ids = [rng.randrange(VOCABULARY) for _ in range(PROMPT)]
    for turn in range(TURNS):
        limit = rng.randint(ACTION // 2, ACTION * 3 // 2)
        made = await engine.generate(
            name, ids, max_new_tokens=limit, temperature=1.0, stop_ids=(), seed=rng.getrandbits(32) + turn
        )
        ids += [*made.token_ids, *(rng.randrange(VOCABULARY) for _ in range(OBSERVATION if turn + 1 < TURNS else 0))]
    engine.release(name)
    return len(ids)


async def measure(folder: Path, rows: int, seconds: float) -> dict[str, Any]:
    """Figures of `rows` places that play episodes for `seconds`."""
    engine = TorchEngine(folder, 1, max_sessions=rows, max_tokens=480)
    until = time.perf_counter() + seconds
    counts = [0, 0]

    async def place(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() < until:
            num_tokens = await episode(engine, f"{number}", rng)
            counts[0] += 1
            counts[1] += num_tokens

    begun = time.perf_counter()
    await asyncio.gather(*(place(i) for i in range(rows)))
    took = time.perf_counter() - begun
    busy = engine.busy_s / took
    await engine.close()
    return {
        "name": f"embedded engine, {rows} episodes at once",
        "value": round(counts[1] / took),
        "unit": "tokens/s",
        "episodes_per_s": round(counts[0] / took),
        "busy": round(busy, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 128, 256])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    first = None
    with tempfile.TemporaryDirectory() as folder:
        write_policy(Path(folder))
        for rows in arguments.rows:
            figures = asyncio.run(measure(Path(folder), rows, arguments.seconds))
            first = first or figures
            reference = {
                "reference": f"{arguments.rows[0]} at once",
                "ratio": round(figures["value"] / first["value"], 2),
            }
            keep(arguments.out, figures | reference)
            print(
                f"{rows:4d} rows: {figures['value']:8,} tokens/s  {figures['episodes_per_s']:7,} episodes/s  "
                f"busy {figures['busy']:.2f}  {reference['ratio']:.2f} times {reference['reference']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
