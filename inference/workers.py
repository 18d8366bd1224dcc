"""Threads that each own one child process, which is killed and replaced when it is late.

A job's time limit begins when a child takes it up, not while it waits for its turn, and needs no signal: it holds in
any thread, and awaiting it blocks no event loop.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from subprocess import DEVNULL, Popen
from typing import IO, Any

from inference.sandbox.inside.frames import FrameError, receive, send

START_S = 30.0
"""Longest time that a child takes to say that it is ready."""


class LateError(Exception):
    """A job did not end within its limit; its process was killed."""


class Child:
    """A child process and the socket on which it takes jobs, its descriptor 0."""

    def __init__(self, process: "Popen[bytes]", stream: socket.socket):
        self.process, self.stream = process, stream

    def ask(self, messages: Sequence[Any], limit_s: float) -> Any:
        """The answer to `messages`.

        Raises:
            LateError: none within `limit_s` seconds.
            EOFError, OSError, FrameError: the child is broken.
        """
        self.stream.settimeout(limit_s)
        try:
            for message in messages:
                send(self.stream, message)
            return receive(self.stream)
        except TimeoutError as error:
            raise LateError(f"no answer within {limit_s:g} s") from error

    def kill(self) -> None:
        """End the process, and wait for that."""
        self.stream.close()
        self.process.kill()
        self.process.wait()


def spawn(command: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes] | None = None) -> Child:
    """Start a child and wait until it says that it is ready.

    Raises:
        OSError, EOFError, FrameError: it does not, within START_S seconds.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = Popen(command, stdin=theirs.fileno(), stdout=DEVNULL, stderr=stderr, env=environment)
    child = Child(process, ours)
    try:
        ours.settimeout(START_S)
        receive(ours)
    except (OSError, EOFError, FrameError):
        child.kill()
        raise
    return child


class Workers:
    """`size` children behind one queue.

    Args:
        start: Makes child `number`, in the thread that will own it (a child may be bound to its parent's thread).
        size: How many jobs run at once.
    """

    def __init__(self, start: Callable[[int], Child], size: int):
        self._start = start
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="worker")
        self._lock = threading.Lock()
        self._free = list(range(size))
        self._own = threading.local()
        self._children: dict[int, Child] = {}

    def submit(self, messages: Sequence[Any], limit_s: float) -> "Future[Any]":
        """The answer of the next free child, `limit_s` counted from when it takes the job."""
        return self._threads.submit(self._run, messages, limit_s)

    async def ask(self, messages: Sequence[Any], limit_s: float) -> Any:
        """As `submit`, for any event loop. Cancelling takes back a job that still waits; one that runs goes on."""
        return await asyncio.wrap_future(self.submit(messages, limit_s))

    def close(self) -> None:
        """Take no more jobs, drop those that wait, let those that run end, end the children."""
        self._threads.shutdown(cancel_futures=True)
        for child in self._children.values():
            child.kill()

    def _run(self, messages: Sequence[Any], limit_s: float) -> Any:
        number = self._number()
        child = self._children.get(number) or self._begin(number)
        try:
            return child.ask(messages, limit_s)
        except (LateError, EOFError, OSError, FrameError):
            self.discard(number)
            raise

    def discard(self, number: int) -> None:
        """End child `number`; the next job gets a new one."""
        self._children.pop(number).kill()

    def _begin(self, number: int) -> Child:
        child = self._start(number)
        self._children[number] = child
        return child

    def _number(self) -> int:
        """The number of this thread, 0 to size - 1."""
        if not hasattr(self._own, "number"):
            with self._lock:
                self._own.number = self._free.pop(0)
        return self._own.number
