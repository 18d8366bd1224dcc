"""The program's side: code that nobody trusts, in a process that has nothing. What it does here harms only itself."""

import atexit
import os
import socket
import sys
import threading
import types
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from inference.sandbox.inside.frames import receive, send
from inference.sandbox.inside.values import pack, unpack

_CHANNEL = 3
_FILE = "program.py"


def run_script(source: str) -> NoReturn:
    """Run `source` as a script and end as one does, but for tearing down an interpreter that many scripts share.

    Touching all of its memory, which was forked, would take longer than most scripts.
    """
    status = _exit_code(source)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by the script
            stream.flush()
    os._exit(status)


def _exit_code(source: str) -> int:
    try:
        exec(compile(source, _FILE, "exec"), _module("__main__").__dict__)  # noqa: S102
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 0xFF
        sys.stderr.write(f"{leaving.code}\n")
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
        return 1
    return 0


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
