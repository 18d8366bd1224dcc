"""Environments that lead the conversation themselves: agent programs, and other frameworks' protocols.

They ask the agent by messages, and may send the whole history each time; the tokens that train are those that were
sampled (`inference.conversation`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inference.environments.base import Environment, Message
from inference.environments.calls import Call
from schemas.errors import LagoonError


class Refused(LagoonError):  # noqa: N818  (an answer, not a fault)
    """The agent cannot answer a request: a limit is reached, the engine is lost, or the request makes no sense."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the agent said.

    Attributes:
        text: As sampled; without the calls where `calls` has them.
        calls: Tool calls, where the request offered tools and all that looks like a call can be read.
        stopped: The agent ended its turn; otherwise a limit did.
        num_prompt_tokens: Tokens that it read.
        num_tokens: Tokens that it sampled.
    """

    text: str
    calls: tuple[Call, ...]
    stopped: bool
    num_prompt_tokens: int
    num_tokens: int


class Chat(Protocol):
    """The agent, as a program meets it."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        """What the agent says to a conversation in OpenAI's form.

        Raises:
            Refused: it cannot.
        """
        ...


class Program(Environment):
    """A task whose conversation the environment leads. `score` is asked for the reward of what `converse` returned."""

    seed = 0

    def reset(self, seed: int) -> list[Message]:
        """Keeps the episode's seed; the prompt is what `converse` says first."""
        self.seed = seed
        return []

    @abstractmethod
    async def converse(self, chat: Chat) -> str:
        """Play the episode with `chat`; returns the final answer. An exception is the environment's failure."""
