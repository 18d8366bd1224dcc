"""Back to where a recorded episode was: the same seed and the same actions again, what was read then compared."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from inference.environments.base import Environment, Message, Result
from inference.environments.calls import Call, Malformed
from inference.tokenizer import ChatTokenizer
from inference.transcript import recorded, tool_messages
from schemas.errors import ContractError
from schemas.messages import Branch

Run = Callable[[Sequence[Call | Malformed]], Awaitable[tuple[Result, ...]]]


async def replay(
    branch: Branch, prompt: Sequence[Message], environment: Environment, tokenizer: ChatTokenizer, run: Run
) -> list[Message]:
    """The conversation up to the forked turn, to which `environment` is brought; `prompt` is what its reset said.

    Raises:
        ContractError: what it says now is not what it said then, so that a branch would not be one.
    """
    said, read, end = list(prompt), tokenizer.prompt(prompt), 0
    for turn, (start, after) in enumerate(branch.actions):
        _compare(branch.token_ids[end:start], read, turn, tokenizer)
        text, end = tokenizer.decode(branch.token_ids[start : after - 1]), after  # the last one is the stop token
        messages, read = await take(text, environment, tokenizer, run)
        said += messages
    _compare(branch.token_ids[end:], read, branch.turn, tokenizer)
    return said


def alternative(branch: Branch, environment: Environment, tokenizer: ChatTokenizer, index: int) -> str | None:
    """What branch `index` says in place of its parent's action, where the tool of its only call has alternatives."""
    if branch.action[-1:] != (tokenizer.end_id,):  # it was cut off, and called nothing
        return None
    calls = environment.parse(tokenizer.decode(branch.action[:-1]))
    if len(calls) != 1 or not isinstance(call := calls[0], Call):
        return None
    tool = environment.tools.get(call.tool)
    choices = tool.alternatives(call.arguments) if tool and tool.alternatives else ()
    return environment.write(replace(call, arguments=choices[index % len(choices)])) if choices else None


async def take(
    text: str, environment: Environment, tokenizer: ChatTokenizer, run: Run
) -> tuple[list[Message], list[int]]:
    """Let the agent have said `text`: the messages of the turn, and the tokens that it reads then."""
    results = await run(environment.parse(text))
    messages = tool_messages(environment, results)
    environment.turn_reward(text, results)  # it may keep count
    said = {"role": "assistant", "content": text}
    return [said, *recorded(messages, results)], tokenizer.observation(messages)


def _compare(then: Sequence[int], now: Sequence[int], turn: int, tokenizer: ChatTokenizer) -> None:
    if list(then) != list(now):
        raise ContractError(
            f"the replay of the episode differs before turn {turn + 1}: {tokenizer.decode(now)[:200]!r} is read, "
            f"{tokenizer.decode(then)[:200]!r} was; the environment does something that its seed does not determine"
        )
