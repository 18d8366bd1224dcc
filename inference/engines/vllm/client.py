"""The requests that a vLLM server answers, over HTTP; each fails with an EngineError that says what was asked."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from inference.engines.base import EngineError
from infra.waits import WAITS

_CONTROL_S = 10.0
_POLL_S = 0.25
_SHOWN = 500


class Client:
    """Speaks to the server at `url`. Make it where an event loop runs."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # the server closes idle and failed ones at will
        self._session = aiohttp.ClientSession(connector=connector)

    async def close(self) -> None:
        """Drop every connection; the server aborts what they wait for."""
        await self._session.close()

    async def wait_until_up(self, limit_s: float, fault: Callable[[], str]) -> None:
        """Wait until the server answers.

        Raises:
            EngineError: `fault` says why it never will, or it has not within `limit_s`.
        """
        with WAITS.on("the vLLM server to come up", limit_s, "the version is skipped") as wait:
            while time.monotonic() - wait.since < limit_s:
                try:
                    await self._ask("GET", "/health", None, _CONTROL_S)
                    return
                except EngineError as error:
                    wait.note(str(error))
                if reason := fault():
                    raise EngineError(reason)
                await asyncio.sleep(_POLL_S)
            raise EngineError(f"no vLLM server after {limit_s:g} s (vllm.start_timeout_s): {wait.reason}")

    async def generate(self, token_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """What the server sampled after `token_ids`. No limit of its own: the episode has one, and cancels."""
        body = {"token_ids": token_ids, "sampling_params": {"detokenize": False, "logprobs": 0, **sampling}}
        return await self._ask("POST", "/inference/v1/generate", body, None)

    async def pause(self) -> None:
        """Stop between two tokens; requests stay and wait."""
        await self._ask("POST", "/pause?mode=keep", None, _CONTROL_S)

    async def resume(self) -> None:
        """Go on."""
        await self._ask("POST", "/resume", None, _CONTROL_S)

    async def reload(self, folder: Path, limit_s: float) -> None:
        """Load the weights of `folder` in place. Call it paused."""
        body = {"method": "lagoon_reload", "kwargs": {"folder": str(folder.absolute())}, "timeout": limit_s}
        with WAITS.on("the vLLM server to load weights", limit_s, "those before are loaded again"):
            await self._ask("POST", "/collective_rpc", body, limit_s)

    async def stamp(self, version: int) -> None:
        """Stamp tokens with `version` from now on."""
        await self._ask("POST", "/update_weight_version", {"new_version": str(version)}, _CONTROL_S)

    async def forget(self) -> None:
        """Empty the prefix cache; contexts of waiting requests are read again.

        Raises:
            EngineError: something of it is still in use.
        """
        answer = await self._ask("POST", "/reset_prefix_cache?reset_running_requests=true", None, _CONTROL_S)
        if not answer.get("success"):
            raise EngineError("the prefix cache could not be emptied; its entries are of other weights")

    async def sleep(self, limit_s: float) -> None:
        """Move the weights off the device and drop the KV cache. No request may be in flight."""
        await self._ask("POST", "/sleep?level=1", None, limit_s)

    async def wake_up(self, limit_s: float) -> None:
        """Bring back what `sleep` moved, and go on."""
        await self._ask("POST", "/wake_up", None, limit_s)

    async def is_sleeping(self) -> bool:
        """Whether it sleeps, or is paused."""
        return bool((await self._ask("GET", "/is_sleeping", None, _CONTROL_S))["is_sleeping"])

    async def metrics(self) -> str:
        """The server's own metrics, as Prometheus text."""
        return await self._ask("GET", "/metrics", None, _CONTROL_S)

    async def _ask(self, method: str, path: str, body: Any, limit_s: float | None) -> Any:
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=_CONTROL_S)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise EngineError(f"{path}: status {response.status}: {(await response.text())[:_SHOWN]}")
                if response.content_type == "application/json":
                    return await response.json()
                return await response.text()
        except TimeoutError as error:
            raise EngineError(f"{path}: no answer within {limit_s} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"{path}: {type(error).__name__}: {error}") from error
