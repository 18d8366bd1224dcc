"""A harness for environments of `verifiers`: a chat loop with tools, in this process.

Importing the module makes it known to `verifiers` as the harness `lagoon_chat`.
"""

import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

NAME = "lagoon_chat"


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the model, runs the tools that it calls, and so on, until it answers without a call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One segment of the exchange; every call of the model goes by `endpoint`, where stops and hooks apply."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages += (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        )
        async with AsyncExitStack() as stack:
            headers = {"Authorization": f"Bearer {secret}"}
            session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                async with session.post(f"{endpoint}/chat/completions", json=body) as response:
                    if response.status != 200:
                        return vf.ProgramResult(1, "", f"the model answered {response.status}: {await response.text()}")
                    message = (await response.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, message.get("content") or "", "")
                for call in message["tool_calls"]:
                    content = await _called(connections, dispatch, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def _called(connections: dict[str, Any], dispatch: dict[str, tuple[str, str]], function: dict[str, str]) -> Any:
    """The tool's result, or what was wrong with the call: the agent reads either."""
    name = function["name"]
    if name not in dispatch:
        return f"error: no tool {name[:80]!r}; there is {', '.join(sorted(dispatch))}"
    return await call_mcp(connections, dispatch, name, json.loads(function["arguments"]))


__all__ = ["ChatHarness"]

sys.modules.setdefault(NAME, sys.modules[__name__])
