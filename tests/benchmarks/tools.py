"""Tool calls of many episodes, each by itself or merged into requests, against one HTTP service.

python -m tests.benchmarks.tools [--out bench.jsonl]

The service answers four requests at once; one takes 10 ms and 0.1 ms for each item. 256 episodes call it 8 times each.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from inference.environments.base import Environment, Message, Score, Tool
from inference.environments.calls import Call
from inference.tools import Toolbox
from tests.benchmarks.lines import tell
from tests.judge_server import serving

EPISODES, CALLS = 256, 8
AT_ONCE, REQUEST_S, ITEM_S = 4, 0.010, 0.0001


class Lookup(Environment):
    """An environment whose one tool asks the service."""

    def __init__(self, tool: Tool) -> None:
        self.tools = {"double": tool}

    def reset(self, seed: int) -> list[Message]:
        """Never asked."""
        return []

    async def score(self, answer: str) -> Score:
        """Never asked."""
        return Score(0.0)


async def measure() -> dict[str, Any]:
    """Calls a second, and their latencies."""
    free = asyncio.Semaphore(AT_ONCE)

    async def double(items: list[dict[str, Any]]) -> web.StreamResponse:
        async with free:
            await asyncio.sleep(REQUEST_S + ITEM_S * len(items))
        return web.json_response([2 * item["n"] for item in items])

    async with serving(double) as server, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(items: Sequence[dict[str, Any]]) -> list[str]:
            async with session.post(server.url, json={"items": items}) as response:
                return [str(n) for n in await response.json()]

        async def one(arguments: dict[str, Any]) -> str:
            return (await ask([arguments]))[0]

        ways = {"single": Tool(one), "merged": Tool(one, run_batch=ask, batch_window_s=0.005)}
        figures = dict[str, Any]()
        for way, tool in ways.items():
            server.requests.clear()
            figures[way] = await _play(tool) | {"requests": len(server.requests)}
    merged, single = figures["merged"]["calls_per_s"], figures["single"]["calls_per_s"]
    line = {"name": "merged tools", "value": merged, "unit": "calls/s", "reference": single}
    return line | {"ratio": round(merged / single, 1)} | figures


async def _play(tool: Tool) -> dict[str, float]:
    toolbox, environment, latencies = Toolbox(), Lookup(tool), list[float]()

    async def episode(number: int) -> None:
        for _ in range(CALLS):
            (result,) = await toolbox.run(environment, [Call("double", {"n": number}, "")], 60)
            assert result.text == str(2 * number), result
            latencies.append(result.latency_s)

    begun = time.perf_counter()
    await asyncio.gather(*(episode(n) for n in range(EPISODES)))
    took_s = time.perf_counter() - begun
    p50, p99 = np.percentile(latencies, [50, 99])
    return {
        "calls_per_s": round(len(latencies) / took_s),
        "p50_ms": round(float(p50) * 1e3),
        "p99_ms": round(float(p99) * 1e3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures = asyncio.run(measure())
    tell(figures, args.out)


if __name__ == "__main__":
    main()
