"""The vLLM engine: continuous batching, paged KV cache and prefix caching of a real server, swapped in flight.

A swap pauses the server between two tokens, reloads the weights in place, stamps the new version, empties the prefix
cache and resumes. Requests in flight stay; the server reads their contexts again with the new weights, so each token's
logprob is that of exactly one version over the whole context, and the server's spans say which.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import Gauge

from inference.engines.base import EngineError, Generation, check_context, in_time
from inference.engines.vllm import replies
from inference.engines.vllm.card import Card
from inference.engines.vllm.client import Client
from inference.engines.vllm.clock import Clock
from inference.engines.vllm.process import LocalServer
from infra.turns import Turn
from schemas.settings import Vllm

STALL = Gauge("lagoon_swap_stall_seconds", "Time from pause to resume in the last weight swap")
LOAD = Gauge("lagoon_swap_load_seconds", "Time of that in which weights were loaded")
PREFIX_QUERIES = Gauge("lagoon_prefix_cache_queries", "Context tokens that the server looked up since it started")
PREFIX_HITS = Gauge("lagoon_prefix_cache_hits", "Context tokens of those whose keys and values were cached")

_COUNTERS = {"vllm:prefix_cache_queries_total": PREFIX_QUERIES, "vllm:prefix_cache_hits_total": PREFIX_HITS}
_MEASURE_S = 2.0


class VllmEngine:
    """An `Engine` (see `inference.engines.base`) on a vLLM server: one of its own, or one at a given address."""

    def __init__(
        self,
        folder: Path,
        version: int,
        *,
        settings: Vllm,
        log: Path,
        max_tokens: int,
        threads: int,
        turn: Turn | None = None,
    ) -> None:
        """Nothing is started before the first request.

        Args:
            folder: The Hugging Face folder to serve first.
            version: What to stamp on its tokens.
            settings: section `vllm`.
            log: Where an own server's output goes.
            max_tokens: Longest context, prompt and sampled tokens together.
            threads: Of an own server, on a CPU.
            turn: On a card that it shares; see `inference.engines.vllm.card`.
        """
        self._settings, self._max_tokens = settings, max_tokens
        self._first = folder, version
        self._served: tuple[Path, int] | None = None
        self._server = LocalServer(settings, log, max_tokens=max_tokens, threads=threads)
        self._client: Client | None = None
        self._clock, self._lock = Clock(), asyncio.Lock()
        self._lost = ""
        self._card = Card(turn, settings.swap_timeout_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def weight_version(self) -> int:
        """The version that would sample the next token; 0 before the server is up."""
        return self._served[1] if self._served else 0

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request in flight."""
        return self._clock.busy_s

    @property
    def fault(self) -> str:
        """See `Engine.fault`."""
        return self._lost or self._server.fault or self._card.fault

    async def ready(self, session: str) -> None:
        """See `Engine.ready`."""
        async with self._card.needed(session):
            pass

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
        """See `Engine.generate`. The prefix cache knows sessions by their tokens."""
        check_context(token_ids, max_new_tokens, self._max_tokens)
        sampling = {
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "stop_token_ids": list(stop_ids),
            "ignore_eos": True,
            "seed": seed,
        }
        async with self._card.needed(session):
            client, entered = await self._up(), self._clock.enter()
            try:
                reply = await client.generate(list(token_ids), sampling)
            except EngineError as error:
                raise EngineError(self.fault or str(error)) from error
            finally:
                share_s = self._clock.leave(entered)
        return replies.generation(reply, stop_ids, temperature, share_s)

    def release(self, session: str) -> None:
        """See `Engine.release`. The prefix cache forgets by age."""
        self._card.release(session)

    async def load(self, version: int, folder: Path) -> None:
        """See `Engine.load`. Starts the server where none runs."""
        async with self._lock:
            if was_broken := self.fault:
                await self._card.forget()
            async with self._card.needed():
                if self._client is not None and not was_broken:
                    await self._swap(self._client, version, folder)
                else:
                    await self._start(version, folder)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.score`."""
        async with self._card.needed():
            client, options = await self._up(), {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            reply = await in_time(client.generate(list(token_ids), options), "score the probe")
        return replies.prompt_logprobs(reply, token_ids)

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
        await self._disconnect()
        await self._stop()

    async def _stop(self) -> None:
        await asyncio.to_thread(self._server.stop)
        self._card.gone()

    async def _up(self) -> Client:
        """The client of a server that is up; the first call starts it.

        Raises:
            EngineError: closed, or it has ended.
        """
        if self._served is None and not self.fault:
            async with self._lock:
                if self._served is None and not self.fault:
                    await self._start(self._first[1], self._first[0])
        if self._client is None or self._closed or self.fault:
            raise EngineError(self.fault or "the engine is closed")
        return self._client

    async def _start(self, version: int, folder: Path) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        await self._disconnect()
        self._served, self._lost = None, ""
        url = self._settings.url or await asyncio.to_thread(self._server.start, folder)
        client = Client(url)
        try:
            await client.wait_until_up(self._settings.start_timeout_s, lambda: self._server.fault)
            await self._take_over(client, version, folder)
        except BaseException as error:
            await client.close()
            await self._stop()
            self._lost = str(error) or repr(error)
            raise
        self._client, self._served = client, (folder, version)
        self._tasks = [asyncio.create_task(work) for work in (self._measure(client), self._card.rest(client))]

    async def _take_over(self, client: Client, version: int, folder: Path) -> None:
        """An own server has the weights already; what a given one holds is not known."""
        if self._settings.url:
            await client.pause()
            await client.reload(folder, self._settings.swap_timeout_s)
            await client.forget()
            await client.stamp(version)
            await client.resume()
        else:
            await client.stamp(version)

    async def _swap(self, client: Client, version: int, folder: Path) -> None:
        """Serve other weights; where they cannot be loaded, the old ones, and where not even those, nothing."""
        begun = time.perf_counter()
        try:
            await client.pause()
            failure = await self._replace(client, version, folder)
            await client.resume()
        except BaseException as error:  # also a cancelled swap: a server that stays paused must not look well
            await self._give_up(f"the server could not be brought through a weight swap: {error!r}")
            raise
        STALL.set(time.perf_counter() - begun)
        if failure is not None:
            raise failure

    async def _replace(self, client: Client, version: int, folder: Path) -> EngineError | None:
        """Replace the weights of a paused server; returns why it holds the old ones still, None where it does not."""
        begun = time.perf_counter()
        try:
            await client.reload(folder, self._settings.swap_timeout_s)
            failure = None
        except EngineError as error:
            failure = error
            if self._served is None:
                raise
            await client.reload(self._served[0], self._settings.swap_timeout_s)
        LOAD.set(time.perf_counter() - begun)
        await client.forget()
        if failure is None:
            await client.stamp(version)
            self._served = folder, version
        return failure

    async def _give_up(self, reason: str) -> None:
        """Requests in flight fail; the next `load` starts anew."""
        self._lost = reason
        await self._disconnect()
        await self._stop()

    async def _disconnect(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def _measure(self, client: Client) -> None:
        while True:
            with contextlib.suppress(EngineError):  # a server that is gone is told by `fault`
                for name, value in _counters(await client.metrics()).items():
                    _COUNTERS[name].set(value)
            await asyncio.sleep(_MEASURE_S)


def _counters(text: str) -> dict[str, float]:
    """Sums of the counters that are exported, from Prometheus text."""
    sums = dict.fromkeys(_COUNTERS, 0.0)
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name in sums:
            sums[name] += float(line.rpartition(" ")[2])
    return sums
