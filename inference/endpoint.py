"""The agent behind OpenAI's chat protocol, on loopback, for one episode: any program that takes a base URL can meet it.

    POST <url>/chat/completions    also with `stream`; the sampling is the settings', and only `max_tokens` is heeded
    GET  <url>/models
    POST <url>/finish              {"reward": 0.5} ends the episode's account

The URL holds a secret, so that no other program of the machine can join.
"""

import json
import math
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from inference.conversation import as_message
from inference.environments.program import Chat, Refused, Reply

MODEL = "policy"
MAX_REQUEST_BYTES = 16 << 20


class Endpoint:
    """A served conversation. `reward` is what `finish` said, None before."""

    def __init__(self, chat: Chat) -> None:
        self.key, self.url = secrets.token_urlsafe(24), ""
        self.reward: float | None = None
        self._chat = chat

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """`chat/completions`."""
        body = await _json(request)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if (limit is not None and (type(limit) is not int or limit < 1)) or body.get("n") not in (None, 1):
            return _error("expected max_tokens of 1 or more, and n of 1", "invalid_request")
        try:
            reply = await self._chat.reply(_list(body, "messages"), _list(body, "tools"), limit)
        except Refused as error:
            return _error(str(error), "context_length_exceeded" if "limit" in str(error) else "invalid_request")
        if body.get("stream"):
            return await _stream(request, reply)
        return web.json_response(_completion(reply))

    async def models(self, request: web.Request) -> web.Response:
        """`models`."""
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "lagoon"}]})

    async def finish(self, request: web.Request) -> web.Response:
        """`finish`."""
        reward: Any = (await _json(request)).get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            return _error(f"reward {reward!r}; expected a finite number", "invalid_request")
        self.reward = float(reward)
        return web.json_response({"reward": self.reward})


@asynccontextmanager
async def serving(chat: Chat) -> AsyncGenerator[Endpoint]:
    """Serve `chat` while inside."""
    endpoint = Endpoint(chat)
    app = web.Application(client_max_size=MAX_REQUEST_BYTES)
    app.router.add_post(f"/{endpoint.key}/v1/chat/completions", endpoint.complete)
    app.router.add_get(f"/{endpoint.key}/v1/models", endpoint.models)
    app.router.add_post(f"/{endpoint.key}/v1/finish", endpoint.finish)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}/{endpoint.key}/v1"
        yield endpoint
    finally:
        await runner.cleanup()


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise web.HTTPBadRequest(text=f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="expected a JSON object")
    return body


def _list(body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise web.HTTPBadRequest(text=f"{name}: expected a list of objects")
    return value


def _error(message: str, code: str) -> web.Response:
    """A refusal that clients do not try again."""
    return web.json_response({"error": {"message": message, "type": "invalid_request_error", "code": code}}, status=400)


def _completion(reply: Reply) -> dict[str, Any]:
    choice = {"index": 0, "message": as_message(reply), "finish_reason": _finish_reason(reply), "logprobs": None}
    return _frame("chat.completion") | {"choices": [choice], "usage": _usage(reply)}


async def _stream(request: web.Request, reply: Reply) -> web.StreamResponse:
    """The whole reply as one chunk: it is sampled before it is known to be a call."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    delta = as_message(reply)
    for i, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = i
    frames = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(reply)}]},
        {"choices": [], "usage": _usage(reply)},
    ]
    for frame in frames:
        await response.write(f"data: {json.dumps(_frame('chat.completion.chunk') | frame)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def _frame(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": kind, "created": int(time.time()), "model": MODEL}


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.calls else "stop" if reply.stopped else "length"


def _usage(reply: Reply) -> dict[str, int]:
    read, said = reply.num_prompt_tokens, reply.num_tokens
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}
