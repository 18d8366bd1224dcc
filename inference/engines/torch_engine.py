"""The embedded engine: a Llama-architecture policy sampled in this process, on the CPU.

One task drives the sampler: between two forward passes it swaps weights, frees rows and admits requests, so nothing
needs a lock, and a token's version is the one that the pass really used. The passes run on a thread of their own.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from inference.engines.base import EngineError, Generation, check_context, in_time
from inference.engines.llama import Llama
from inference.engines.sampler import Request, Sampler

T = TypeVar("T")


class TorchEngine:
    """An `Engine` (see `inference.engines.base`) for laptops and tests."""

    def __init__(self, folder: Path, version: int, *, max_sessions: int, max_tokens: int, threads: int = 1):
        """Serve the Hugging Face folder `folder` as `version`.

        Args:
            folder: `config.json` and safetensors.
            version: What to stamp on its tokens.
            max_sessions: Rows of the KV cache; further requests wait for a row.
            max_tokens: Longest context, prompt and sampled tokens together.
            threads: Threads of the forward pass, for this whole process.

        Raises:
            EngineError: the folder cannot be served.
        """
        torch.set_num_threads(threads)
        self._sampler = Sampler(Llama(folder), version, max_sessions, max_tokens)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._waiting: deque[Request] = deque()
        self._answers: dict[Request, asyncio.Future[Generation]] = {}
        self._released: list[str] = []
        self._swaps: list[tuple[int, Llama, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def weight_version(self) -> int:
        """The version that would sample the next token."""
        return self._sampler.version

    @property
    def busy_s(self) -> float:
        """Seconds of forward passes and sampling since the start."""
        return self._sampler.busy_s

    @property
    def fault(self) -> str:
        """See `Engine.fault`: it lives as long as this process."""
        return ""

    @property
    def num_tokens(self) -> int:
        """Tokens read or sampled since the start."""
        return self._sampler.num_tokens

    async def ready(self, session: str) -> None:
        """See `Engine.ready`: nothing is shared."""

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
        """See `Engine.generate`."""
        check_context(token_ids, max_new_tokens, self._sampler.length)
        self._start()
        request = Request(
            session, list(token_ids), max_new_tokens, temperature, frozenset(stop_ids), random.Random(seed)
        )
        answer = asyncio.get_running_loop().create_future()
        self._answers[request] = answer
        self._waiting.append(request)
        self._wake.set()
        try:
            return await answer
        finally:
            request.cancelled = True  # no effect on a request that is answered
            self._answers.pop(request, None)

    def release(self, session: str) -> None:
        """See `Engine.release`."""
        self._released.append(session)
        self._wake.set()

    async def load(self, version: int, folder: Path) -> None:
        """See `Engine.load`."""
        llama = await in_time(asyncio.to_thread(Llama, folder), f"read version {version}")
        self._start()
        done = asyncio.get_running_loop().create_future()
        self._swaps.append((version, llama, done))
        self._wake.set()
        await in_time(done, f"swap to version {version}")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.score`."""
        self._start()
        try:
            return await in_time(self._on_thread(self._sampler.logprobs, token_ids), "score the probe")
        except (RuntimeError, IndexError) as error:
            raise EngineError(f"cannot score {len(token_ids)} tokens: {error}") from error

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
        self._thread.shutdown(wait=True)
        self._fail(EngineError("the engine is closed"))
        for _, _, done in self._swaps:
            done.cancel()

    def _start(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._driver is None:
            self._driver = asyncio.get_running_loop().create_task(self._drive(), name="engine")

    async def _drive(self) -> None:
        while True:
            self._between_passes()
            if not self._sampler.busy:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                complete = await self._on_thread(self._sampler.advance)
            except Exception as error:  # whatever broke: nobody may wait for an answer that cannot come
                self._sampler.drop()
                self._fail(EngineError(f"the forward pass failed: {type(error).__name__}: {error}"))
                continue
            for request, generation in complete:
                _set(self._answers.get(request), generation)

    def _between_passes(self) -> None:
        for version, llama, done in self._swaps:
            try:
                self._sampler.swap(llama, version)
                _set(done, None)
            except EngineError as error:
                if not done.done():
                    done.set_exception(error)
        self._swaps.clear()
        for session in self._released:
            self._sampler.release(session)
        self._released.clear()
        while self._waiting and (self._waiting[0].cancelled or self._sampler.admit(self._waiting[0])):
            self._waiting.popleft()

    async def _on_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _fail(self, error: EngineError) -> None:
        self._waiting.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)


def _set(future: asyncio.Future[T] | None, value: T) -> None:
    """Answer `future`, unless whoever waited has left."""
    if future is not None and not future.done():
        future.set_result(value)
