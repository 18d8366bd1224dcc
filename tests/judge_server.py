"""A real HTTP judge on loopback that scores, waits, fails or talks nonsense, as a test tells it."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Behavior = Callable[[list[dict[str, Any]]], Awaitable[web.StreamResponse]]


@dataclass
class JudgeServer:
    """`requests` are the items of each request, `tokens` the authorization of each."""

    behavior: Behavior
    url: str = ""
    requests: list[list[dict[str, Any]]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        items = (await request.json())["items"]
        self.requests.append(items)
        self.tokens.append(request.headers.get("Authorization"))
        return await self.behavior(items)


@asynccontextmanager
async def serving(behavior: Behavior) -> AsyncGenerator[JudgeServer]:
    server = JudgeServer(behavior)
    app = web.Application()
    app.router.add_post("/score", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
    try:
        yield server
    finally:
        await runner.cleanup()
