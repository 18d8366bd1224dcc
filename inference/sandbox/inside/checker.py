"""The tests' side: runs them against a stand-in for the candidate and reports a verdict for each, by name.

It shares nothing with the candidate but a socket on which plain values travel, compares values that it built itself,
and is the only process besides the keeper that holds the socket of the verdicts.
"""

import builtins
import socket
import types
from typing import Any

from inference.sandbox.inside.frames import FrameError, receive, send
from inference.sandbox.inside.values import pack, unpack


class Gone(BaseException):
    """The candidate's process is gone, or answers nonsense. No `except Exception` of a test takes it for a result."""


class Candidate:
    """Calls the candidate in its process. After `Gone` it is not asked again, and no test passes."""

    def __init__(self, channel: socket.socket, name: str):
        self.channel = channel
        self.gone: str | None = None
        self.__name__ = name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        request = {"arguments": pack(list(arguments)), "keywords": pack(keywords)}
        if self.gone is None:
            try:
                send(self.channel, request)
                result = _result(receive(self.channel))
            except (
                EOFError,
                OSError,
                FrameError,
                LookupError,
                TypeError,
                ValueError,
                ArithmeticError,
                RecursionError,
            ) as error:
                self.gone = f"{type(error).__name__}: {error}"
            else:
                if isinstance(result, Exception):
                    raise result
                return result
        raise Gone(self.gone)


def _result(reply: dict[str, Any]) -> Any:
    """The value in `reply`, which is never an exception, or the exception that the candidate's function raised."""
    return _exception(reply["raised"], str(reply["text"])) if "raised" in reply else unpack(reply["value"])


def check(report: socket.socket, channel: socket.socket, entry_point: str) -> None:
    """Receive the tests, run them, report `{"test": name, "passed": bool}` for each, in order.

    A preamble or a test that does not even compile is reported as a fault: it is not the candidate's.
    """
    tests = receive(report)
    candidate = Candidate(channel, entry_point)
    namespace = _namespace()
    try:
        exec(compile(tests["preamble"], "preamble.py", "exec"), namespace)  # noqa: S102
        compiled = [(name, compile(source, f"{name}.py", "exec")) for name, source in tests["tests"]]
    except BaseException as error:
        send(report, {"fault": f"the tests are broken: {type(error).__name__}: {error}"})
        return
    namespace |= {"candidate": candidate, entry_point: candidate}
    for name, code in compiled:
        why = _failure(code, namespace, candidate)
        send(report, {"test": name, "passed": why is None, "why": why})


def _failure(code: types.CodeType, namespace: dict[str, Any], candidate: Candidate) -> str | None:
    """None if the test passes, else why it does not."""
    try:
        exec(code, namespace)  # noqa: S102
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:200]
    return candidate.gone


def _namespace() -> dict[str, Any]:
    return types.ModuleType("tests").__dict__


def _exception(name: Any, text: str) -> Exception:
    """The built-in exception of that name, else one that says it."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # it takes other arguments
            return RuntimeError(f"{name}: {text}")
    return RuntimeError(f"{name}: {text}")
