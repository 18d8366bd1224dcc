"""The program's side: code that nobody trusts, in a process that has nothing. What it does here harms only itself."""

import socket
import sys
import types
from functools import partial
from typing import Any

from inference.sandbox.inside.frames import receive, send
from inference.sandbox.inside.values import pack, unpack

_CHANNEL = 3
_FILE = "program.py"


def run_script(source: str) -> None:
    """Run `source` as a script; the interpreter then ends in its usual way."""
    exec(compile(source, _FILE, "exec"), _module("__main__").__dict__)  # noqa: S102


def run_candidate(source: str, entry_point: str) -> None:
    """Run `source` as a module, then call its `entry_point` whenever the checker asks.

    A module that raises is not the end: each call then raises the same, so that the verdicts say what was wrong.
    """
    namespace = _module("candidate").__dict__
    try:
        exec(compile(source, _FILE, "exec"), namespace)  # noqa: S102
    except Exception as error:
        namespace[entry_point] = partial(_raise, error)
    channel = socket.socket(fileno=_CHANNEL)
    while True:
        send(channel, _reply(namespace, entry_point, receive(channel)))


def _reply(namespace: dict[str, Any], entry_point: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments, keywords = unpack(request["arguments"]), unpack(request["keywords"])
        return {"value": pack(namespace[entry_point](*arguments, **keywords))}
    except Exception as error:
        return {"raised": type(error).__name__, "text": str(error)[:200]}


def _raise(error: Exception, *_: Any, **__: Any) -> None:
    raise error


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module
