"""A conversation that a program leads by sending its history again and again, as tokens that only ever grow.

The rule, for each request of an episode:

- The first one opens the conversation.
- One that begins with all that was said so far, in the same words and with the same tools, and adds to it, goes on: its
  prompt is the tokens so far and those of the new messages. Nothing sampled is decoded and encoded again.
- One equal to the last is a client's second try and gets the same reply.
- Any other history is answered aside: it is sampled, but no part of the trajectory. How often is the reward's part
  `asides`, so that an agent which rewrites its history can be told from one that does not.

So an episode is one trajectory, whatever its program does.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from inference.engines.base import Generation
from inference.environments.base import Message, Result
from inference.environments.calls import Call, Malformed, explain, parse_calls, without_calls
from inference.environments.program import Refused, Reply
from inference.tokenizer import ChatTokenizer
from inference.transcript import Transcript
from schemas.names import ResultStatus, StopReason

TOOLS = 'To call a tool, write <call>{"name": "...", "arguments": {...}}</call>; its result comes next. Tools:\n'

Act = Callable[[int, int | None], Awaitable[tuple[Generation, str]]]
"""(turn number, limit of tokens) -> what is sampled after the transcript, which it joins."""
Aside = Callable[[Sequence[int], int, int | None], Awaitable[tuple[Generation, str]]]
"""(prompt, number, limit of tokens) -> what is sampled after `prompt`, outside of the transcript."""

Heard = tuple[str, str, tuple[tuple[str, str], ...]]
"""A message as it is compared: role, text, calls."""


class Conversation:
    """One episode's conversation; implements `Chat`.

    Attributes:
        num_asides: Requests that were answered outside of the trajectory.
        refused: The limit of the episode that a request ran into; None while none did.
        fault: The engine's failure; later requests are refused.
    """

    def __init__(
        self,
        transcript: Transcript,
        tokenizer: ChatTokenizer,
        *,
        max_turns: int,
        max_tokens: int,
        act: Act,
        aside: Aside,
    ) -> None:
        self.num_asides = 0
        self.refused: StopReason | None = None
        self.fault: Exception | None = None
        self._transcript, self._tokenizer, self._act, self._aside = transcript, tokenizer, act, aside
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._lock = asyncio.Lock()
        self._tools: Sequence[dict[str, Any]] = ()
        self._history: list[Heard] = []
        self._open: tuple[Generation, tuple[Result, ...], float] | None = None
        self._last: tuple[list[Heard], Reply] | None = None

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        """See `Chat.reply`."""
        heard = [_heard(message) for message in messages]
        if not heard:
            raise Refused("no messages")
        async with self._lock:
            same_tools = not self._history or list(tools) == list(self._tools)
            if self._last is not None and same_tools and heard == self._last[0]:
                return self._last[1]
            self._admit()
            if same_tools and heard[: len(self._history)] == self._history and len(heard) > len(self._history):
                self._tools = tools
                return await self._go_on(heard, max_tokens)
            return await self._answer_aside(heard, tools, max_tokens)

    def close(self) -> None:
        """End the last turn."""
        if self._open is not None:
            generation, results, begun_s = self._open
            self._transcript.end_turn(len(generation.token_ids), results, 0.0, time.perf_counter() - begun_s)
            self._open = None

    def _admit(self) -> None:
        if self.fault is not None:
            raise Refused(f"the engine failed: {self.fault}")
        num_turns = len(self._transcript.turns) + (self._open is not None)
        if num_turns + self.num_asides >= self._max_turns:
            self.refused = StopReason.MAX_TURNS
        if self.refused is not None:
            raise Refused(f"the episode has reached its limit: {self.refused}")

    async def _go_on(self, heard: list[Heard], max_tokens: int | None) -> Reply:
        number, begun_s = len(self._transcript.turns) + (self._open is not None), time.perf_counter()
        self._listen(heard[len(self._history) :])
        num_prompt_tokens = len(self._transcript.token_ids)
        generation, text = await self._sample(self._act(number, max_tokens))
        reply, results = self._read(generation, text, self._tools, num_prompt_tokens)
        self._open = (generation, results, begun_s)
        self._history = [*heard, _heard(as_message(reply))]
        self._last = (heard, reply)
        return reply

    def _listen(self, new: Sequence[Heard]) -> None:
        """Append what the program says, if that leaves room to answer."""
        messages = [_rendered(message) for message in new]
        first = not self._history
        if first:
            messages = self._with_tools(messages, self._tools)
            token_ids = self._tokenizer.prompt(messages)
        else:
            token_ids = self._tokenizer.observation(messages)
            if self._open is not None and not self._open[0].stopped:  # a turn that was cut off ends all the same
                token_ids = [self._tokenizer.end_id, *token_ids]
        self._check_room(len(self._transcript.token_ids) + len(token_ids))
        if first:
            self._transcript.prompt(messages, token_ids)
            return
        self._transcript.observation(messages, token_ids)
        self.close()

    async def _answer_aside(self, heard: list[Heard], tools: Sequence[dict[str, Any]], max_tokens: int | None) -> Reply:
        number = self.num_asides = self.num_asides + 1
        prompt = self._tokenizer.prompt(self._with_tools([_rendered(message) for message in heard], tools))
        if len(prompt) >= self._max_tokens:
            raise Refused(f"the request has {len(prompt)} tokens; the limit is {self._max_tokens}")
        generation, text = await self._sample(self._aside(prompt, number, max_tokens))
        return self._read(generation, text, tools, len(prompt))[0]

    async def _sample(self, sampling: Awaitable[tuple[Generation, str]]) -> tuple[Generation, str]:
        try:
            return await sampling
        except Exception as error:  # the episode fails by it, however the program takes the refusal
            self.fault = error
            raise Refused(f"the engine failed: {error}") from error

    def _check_room(self, num_tokens: int) -> None:
        if num_tokens >= self._max_tokens:
            self.refused = StopReason.CONTEXT
            raise Refused(f"the conversation has {num_tokens} tokens; the limit is {self._max_tokens}")

    def _read(
        self, generation: Generation, text: str, tools: Sequence[dict[str, Any]], num_prompt_tokens: int
    ) -> tuple[Reply, tuple[Result, ...]]:
        found = parse_calls(text) if tools and generation.stopped else ()
        calls = tuple(call for call in found if isinstance(call, Call))
        readable = len(calls) == len(found)
        reply = Reply(
            without_calls(text) if calls and readable else text,
            calls if readable else (),
            generation.stopped,
            num_prompt_tokens,
            len(generation.token_ids),
        )
        return reply, tuple(_result(call) for call in found)

    def _with_tools(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
        if not tools:
            return messages
        described = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        return [{"role": "system", "content": TOOLS + described}, *messages]


def as_message(reply: Reply) -> Message:
    """The reply in OpenAI's form; a call's id is its place in the turn."""
    message: Message = {"role": "assistant", "content": reply.text}
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{reply.num_prompt_tokens}_{i}",
                "type": "function",
                "function": {"name": call.tool, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for i, call in enumerate(reply.calls)
        ]
    return message


def _heard(message: Message) -> Heard:
    """`message` without what programs change in passing: blanks around it, its form, ids.

    Raises:
        Refused: it is no message of text.
    """
    try:
        role, content = message["role"], message.get("content") or ""
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = tuple((f["name"], json.dumps(json.loads(f["arguments"]), sort_keys=True)) for f in functions)
        text = "".join(parts).replace("\0", "\ufffd").encode("utf-8", "replace").decode().strip()
        return ("system" if role == "developer" else str(role), text, calls)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Refused(f"not a message of text: {str(message)[:200]} ({type(error).__name__}: {error})") from error


def _rendered(message: Heard) -> Message:
    role, text, calls = message
    written = [f'<call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</call>' for name, arguments in calls]
    return {"role": role, "content": "\n".join(filter(None, [text, *written]))}


def _result(call: Call | Malformed) -> Result:
    """What the trajectory keeps of a call that the program runs itself: that it could be read."""
    if isinstance(call, Malformed):
        return Result(call, ResultStatus.MALFORMED, explain(call))
    return Result(call, ResultStatus.OK, "")
