"""Reading tool calls out of an agent's text: `<call>{"name": "search", "arguments": {"query": "x"}}</call>`."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_ECHO = 80
"""Characters of a bad call that its error repeats."""

_TAGGED = re.compile(r"<call>(.*?)</call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """A well-formed tool call; `text` is what the agent wrote."""

    tool: str
    arguments: dict[str, Any]
    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """What looks like a tool call and cannot be read. No tool runs for it."""

    reason: str
    text: str


def parse_calls(action: str) -> Sequence[Call | Malformed]:
    """The JSON calls in `action`, in order; text around them is free. A tag without its partner is malformed."""
    calls: list[Call | Malformed] = [_read(match[1]) for match in _TAGGED.finditer(action)]
    rest = _TAGGED.sub("", action)
    if "<call>" in rest or "</call>" in rest:
        calls.append(Malformed("a call tag without its partner", rest))
    return calls


def without_calls(action: str) -> str:
    """The free text of `action`."""
    return _TAGGED.sub("", action).strip()


def explain(malformed: Malformed) -> str:
    """The error that an agent reads for a malformed call, with a bounded echo of what it wrote."""
    text = malformed.text if len(malformed.text) <= MAX_ECHO else malformed.text[:MAX_ECHO] + "..."
    return f"error: malformed call ({malformed.reason}): {text}"


def _read(text: str) -> Call | Malformed:
    try:
        value = json.loads(text)
    except ValueError as error:
        return Malformed(f"not JSON: {error}", text)
    except RecursionError:
        return Malformed("nested too deep", text)
    if not isinstance(value, dict):
        return Malformed(f"a JSON {type(value).__name__}; expected an object", text)
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str):
        return Malformed("no name", text)
    if not isinstance(arguments, dict):
        return Malformed("arguments are not an object", text)
    return Call(name, arguments, text)
