"""What an engine is: token ids in, sampled token ids out, with the logprobs and weight versions that made them."""

import asyncio
import hashlib
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from infra.waits import WAITS
from schemas.errors import LagoonError
from schemas.trajectory import WeightVersionSpan

LOAD_S = 300.0
"""Limit of reading a version into this process, and of scoring its probe, once the engine is ready for it."""

T = TypeVar("T")


class EngineError(LagoonError):
    """The engine cannot load weights or answer a request."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampled tokens.

    Attributes:
        token_ids: The sampled tokens only, the stop token included when there is one.
        logprobs: Under the distribution that each token was really sampled from, temperature included; 0 at
            temperature 0, where there is no choice.
        spans: [start, end) over `token_ids` and the version that sampled them, stamped as tokens are sampled.
        stopped: Ended by a stop token; otherwise by the limit of tokens.
        accelerator_s: This request's share of the engine's busy time, in seconds.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[WeightVersionSpan, ...]
    stopped: bool
    accelerator_s: float = 0.0


class Engine(Protocol):
    """An engine serves one policy at one weight version, and swaps it while requests are in flight.

    A session is one episode. Its requests are append-only: each starts with every token of the one before, so the
    engine may keep the session's KV cache between turns. Whatever a load or a probe waits for has a limit of its own,
    after which it fails with an EngineError that names it; a request has its episode's. At a swap, a request in flight
    goes on under the new weights (its spans say so); what the old weights cached of it is kept (torch) or read again
    (vllm). A session between requests has its tokens read again by the new weights, and no later request reads what old
    weights cached.
    """

    @property
    def weight_version(self) -> int:
        """The version that would sample the next token."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds spent computing since the start; never falls."""
        ...

    @property
    def fault(self) -> str:
        """Why it can serve nothing until `load` is called again, such as a server that died; else empty."""
        ...

    async def ready(self, session: str) -> None:
        """Wait until the engine's card is its own; it stays so until `session` is released.

        Raises:
            EngineError: who shares it does not leave it.
        """
        ...

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
        """Continue `token_ids` (the whole context so far). Cancelling the call frees its place.

        Raises:
            EngineError: the context is too long, or the engine is closed or broken.
        """
        ...

    def release(self, session: str) -> None:
        """Forget `session`; call it when the episode ends, however it ends."""
        ...

    async def load(self, version: int, folder: Path) -> None:
        """Serve the weights of the Hugging Face folder `folder` as `version`, from the next sampled token on.

        Raises:
            EngineError: the folder cannot be served; the old weights stay.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of token_ids[1:] at temperature 1 under the weights served now: the proof of what is loaded."""
        ...

    async def close(self) -> None:
        """Stop; requests in flight fail with EngineError."""
        ...


async def in_time(work: Awaitable[T], what: str) -> T:
    """The result of `work`.

    Raises:
        EngineError: there is none within LOAD_S; says that the engine did not do `what`.
    """
    with WAITS.on(f"the engine to {what}", LOAD_S, "the version is skipped"):
        try:
            return await asyncio.wait_for(work, LOAD_S)
        except TimeoutError:
            raise EngineError(f"the engine did not {what} within {LOAD_S:g} s; it hangs") from None


def check_context(token_ids: Sequence[int], max_new_tokens: int, limit: int) -> None:
    """Refuse a request that an engine with room for `limit` tokens cannot serve.

    Raises:
        EngineError: nothing to read, nothing to sample, or more of both than `limit`.
    """
    if not token_ids or max_new_tokens < 1 or len(token_ids) + max_new_tokens > limit:
        raise EngineError(
            f"a context of {len(token_ids)} tokens and {max_new_tokens} to sample; "
            f"expected at least one of each and at most {limit} together"
        )


def request_seed(*parts: object) -> int:
    """A seed in [0, 2^63) from `parts`, the same in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
