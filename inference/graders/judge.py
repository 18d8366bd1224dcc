"""Rewards from a service: a judge or a reward model behind HTTP, asked in batches that span episodes.

The service gets `POST url` with `{"items": [{"prompt": ..., "answer": ..., ...}, ...]}` and answers
`{"scores": [0.5, ...]}`, one number for each item, in order. Each try has a limit; a service that is away, overloaded
(429, 5xx) or late is tried again after waits that grow and vary at random, and left alone for a while after many
failures in a row. An answer that is not what was asked for is refused at once.
"""

import asyncio
import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from inference.environments.base import Tool, ToolError, ToolUnavailable
from inference.graders.limited import VerifierError
from inference.tools.guard import Guard
from inference.tools.merge import Merger
from schemas.errors import SettingsError

MAX_REPLY_BYTES = 1 << 20
QUEUE_S = 3600.0
"""Each try has a limit, and the episode's limit bounds the wait for a turn; this is the limit of last resort."""


class JudgeOptions(BaseModel):
    """Where a judge is and how it is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[str, Field(pattern=r"^https?://\S+$")]
    token_variable: str = ""
    """The environment variable that holds the secret of `Authorization: Bearer`; none is sent without one."""
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Seconds of one try."""
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    batch_window_s: Annotated[float, Field(ge=0, le=10)] = 0.05
    """How long the first item of a batch waits for others, in seconds."""
    max_batch: Annotated[int, Field(ge=1, le=1024)] = 64
    max_concurrent: Annotated[int, Field(ge=1, le=256)] = 8
    """Requests at once from a process."""
    lowest: float = 0.0
    highest: float = 1.0
    """Bounds of a score; one outside is refused."""

    def check(self) -> None:
        """Refuse what cannot work, before any episode is spoiled.

        Raises:
            SettingsError: the variable of the secret is not set, or the bounds are empty.
        """
        if self.token_variable and not os.environ.get(self.token_variable):
            raise SettingsError(f"judge {self.url}: the environment variable {self.token_variable} is not set")
        if self.lowest >= self.highest:
            raise SettingsError(f"judge {self.url}: lowest {self.lowest} is not below highest {self.highest}")


async def judged(options: JudgeOptions, item: Mapping[str, Any]) -> float:
    """The judge's score of `item`; goes in one request with what other episodes ask at the time.

    Raises:
        VerifierError: the answer is malformed, too short, or holds a score that is no number within the bounds.
        ToolUnavailable: the judge is away, overloaded or late at every try, or counts as down.
    """
    reply = await _judge(asyncio.get_running_loop(), options.model_dump_json()).merger.run(dict(item))
    assert isinstance(reply, str)  # noqa: S101 - `_Judge` reports no errors of single items
    return float(reply)


@cache
def _judge(loop: asyncio.AbstractEventLoop, settings: str) -> "_Judge":
    """What all episodes of an event loop share."""
    return _Judge(JudgeOptions.model_validate_json(settings))


class _Judge:
    """A guard around requests, and the batch that the next request will carry."""

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options
        tool = Tool(
            _never,
            run_batch=self._ask,
            batch_window_s=options.batch_window_s,
            max_batch=options.max_batch,
            retries=options.retries,
            max_concurrent=options.max_concurrent,
        )
        self._guard = Guard(f"judge {options.url}", tool)
        self.merger = Merger(f"judge {options.url}", tool, self._ask, QUEUE_S)

    async def _ask(self, items: Sequence[dict[str, Any]]) -> Sequence[str | ToolError]:
        scores, _ = await self._guard.run(lambda: self._request(items))
        return [repr(score) for score in scores]

    async def _request(self, items: Sequence[dict[str, Any]]) -> list[float]:
        url, limit_s = self._options.url, self._options.timeout_s
        token = os.environ.get(self._options.token_variable, "") if self._options.token_variable else ""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.post(url, json={"items": items}, allow_redirects=False) as response,
            ):
                status, body = response.status, await _bounded(response)
        except TimeoutError as error:
            raise ToolUnavailable(f"the judge {url} did not answer within {limit_s:g} s") from error
        except aiohttp.ClientError as error:
            raise ToolUnavailable(f"the judge {url} cannot be reached: {type(error).__name__}: {error}") from error
        if status == 429 or status >= 500:
            raise ToolUnavailable(f"the judge {url} answered {status}")
        if status != 200:
            raise VerifierError(f"the judge {url} answered {status}: {body[:200]!r}")
        return self._scores(body, len(items))

    def _scores(self, body: bytes, expected: int) -> list[float]:
        try:
            scores = json.loads(body)["scores"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise VerifierError(f"the judge's answer has no scores ({type(error).__name__}): {body[:200]!r}") from error
        if not isinstance(scores, list) or len(scores) != expected:
            found = len(scores) if isinstance(scores, list) else type(scores).__name__
            raise VerifierError(f"the judge gave {found} scores for {expected} items")
        low, high = self._options.lowest, self._options.highest
        for score in scores:
            if type(score) not in (int, float) or not (math.isfinite(score) and low <= score <= high):
                raise VerifierError(f"the judge gave the score {score!r}; expected a number in [{low:g}, {high:g}]")
        return [float(score) for score in scores]


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            raise VerifierError(f"the judge's answer exceeds {MAX_REPLY_BYTES} bytes")
    return body


async def _never(arguments: dict[str, Any]) -> str:
    raise AssertionError("a judge is only asked in batches")
