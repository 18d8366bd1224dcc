"""What has been said in an episode so far: tokens exactly as sampled, and who said them under which weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inference.engines.base import Generation
from inference.environments.base import Environment, Message, Result
from inference.environments.calls import Call
from schemas.names import ErrorKind, ResultStatus
from schemas.trajectory import Turn, WeightVersionSpan

MAX_ARGUMENTS = 512
"""Characters of a turn's calls that are kept in `turns` (the messages keep all)."""

_FAULTS = {
    ResultStatus.MALFORMED: ErrorKind.MALFORMED_CALL,
    ResultStatus.ERROR: ErrorKind.TOOL_ERROR,
    ResultStatus.TIMEOUT: ErrorKind.TOOL_ERROR,
}


@dataclass(slots=True)
class Transcript:
    """Grows by prompt, actions and observations; ids are appended, never decoded and encoded again."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    action_spans: list[WeightVersionSpan] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    accelerator_s: float = 0.0
    fault: tuple[ErrorKind, str] | None = None
    """The agent's first failure: a malformed call, or a call that its tool refused."""

    def prompt(self, messages: Sequence[dict[str, Any]], token_ids: Sequence[int]) -> None:
        """Begin with the prompt, or add to it."""
        self.messages += messages
        self._read(token_ids)
        self.num_prompt_tokens = len(self.token_ids)

    def action(self, generation: Generation, text: str) -> None:
        """Append what the agent sampled."""
        start = len(self.token_ids)
        self.messages.append({"role": "assistant", "content": text})
        self.token_ids += generation.token_ids
        self.action_mask += [True] * len(generation.token_ids)
        self.behavior_logprobs += generation.logprobs
        self.action_spans += [
            WeightVersionSpan(start + s.start, start + s.end, s.version) for s in generation.spans if s.end > s.start
        ]
        self.num_generated_tokens += len(generation.token_ids)
        self.accelerator_s += generation.accelerator_s

    def observation(self, messages: Sequence[dict[str, Any]], token_ids: Sequence[int]) -> None:
        """Append what the agent reads of its turn's results."""
        self.messages += messages
        self._read(token_ids)

    def end_turn(self, num_action_tokens: int, results: Sequence[Result], reward: float, latency_s: float) -> None:
        """Close the turn whose action and observation are the last tokens; `action_end` is where the action stops."""
        end = len(self.token_ids)
        action_end = self.action_spans[-1].end if self.action_spans else end
        tool, arguments = _calls(results)
        self.turns.append(
            Turn(
                action_start=action_end - num_action_tokens,
                action_end=action_end,
                observation_end=end,
                tool=tool,
                arguments=arguments,
                result_status=next((r.status for r in results if r.status != ResultStatus.OK), _fine(results)),
                reward=reward,
                latency_s=latency_s,
            )
        )
        bad = next((r for r in results if r.status in _FAULTS), None)
        if bad is not None and self.fault is None:
            self.fault = (_FAULTS[bad.status], bad.text[:MAX_ARGUMENTS])

    def spans(self, dispatch_version: int) -> tuple[WeightVersionSpan, ...]:
        """Version of every token: of the action that it belongs to, or of the next one, which read it.

        Tokens after the last action take its version; without any action all take `dispatch_version`.
        """
        if not self.token_ids:
            return ()
        actions = self.action_spans or [WeightVersionSpan(0, 0, dispatch_version)]
        merged: list[WeightVersionSpan] = []
        for span in [*actions, WeightVersionSpan(0, len(self.token_ids), actions[-1].version)]:
            start = merged[-1].end if merged else 0
            if merged and merged[-1].version == span.version:
                start = merged.pop().start
            if span.end > start:
                merged.append(WeightVersionSpan(start, span.end, span.version))
        return tuple(merged)

    def versions(self, dispatch_version: int) -> tuple[int, int]:
        """Oldest and newest version that sampled an action token; `dispatch_version` when none did."""
        versions = [s.version for s in self.action_spans] or [dispatch_version]
        return min(versions), max(versions)

    def _read(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.action_mask += [False] * len(token_ids)
        self.behavior_logprobs += [0.0] * len(token_ids)


def tool_messages(environment: Environment, results: Sequence[Result]) -> list[Message]:
    """What the agent reads of `results`, a message each."""
    return [_tool_message(r, environment.observe(r)) for r in results]


def recorded(messages: Sequence[Message], results: Sequence[Result]) -> list[Message]:
    """`messages`, with what a trajectory keeps of each call beside what the agent read."""
    return [
        m | {"status": r.status, "latency_s": round(r.latency_s, 6), "attempts": r.attempts}
        for m, r in zip(messages, results, strict=True)
    ]


def _tool_message(result: Result, text: str) -> Message:
    name = {"name": result.call.tool} if isinstance(result.call, Call) else {}
    return {"role": "tool", **name, "content": text}


def _fine(results: Sequence[Result]) -> ResultStatus:
    return ResultStatus.OK if results else ResultStatus.NONE


def _calls(results: Sequence[Result]) -> tuple[str | None, str | None]:
    """The turn's tools and what was asked of them, as text; several calls as a JSON list."""
    if not results:
        return None, None
    tools = ",".join(r.call.tool for r in results if isinstance(r.call, Call))
    texts = [r.call.text for r in results]
    arguments = texts[0] if len(texts) == 1 else json.dumps(texts, ensure_ascii=False)
    return tools or None, arguments[:MAX_ARGUMENTS]
