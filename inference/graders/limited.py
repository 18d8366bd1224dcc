"""Verifiers that may take for ever, within a limit that holds in any thread and blocks no event loop.

A verifier runs in a process (`inference.graders.worker`) that is killed at the limit. The limit counts the grading
itself, not the time that a burst of gradings waits for its turn.
"""

import os
import sys
from functools import cache
from typing import Any

from inference.sandbox.inside.frames import FrameError
from inference.workers import Child, LateError, Workers, spawn


class VerifierError(Exception):
    """A verifier failed or took too long. Raised in `Environment.score` it ends the episode without a reward."""


async def limited(verifier: str, *arguments: Any, limit_s: float) -> Any:
    """What the function `verifier` (`module:function`) returns for `arguments`; both are JSON.

    Raises:
        VerifierError: it took longer than `limit_s` seconds, raised something, or its process died.
    """
    try:
        answer = await verifiers().ask([{"verifier": verifier, "arguments": arguments}], limit_s)
    except LateError as error:
        raise VerifierError(f"{verifier} took longer than {limit_s:g} s") from error
    except (EOFError, OSError, FrameError) as error:
        raise VerifierError(f"the process of {verifier} broke: {type(error).__name__}: {error}") from error
    if "error" in answer:
        raise VerifierError(f"{verifier}: {answer['error']}")
    return answer["value"]


@cache
def verifiers() -> Workers:
    """The verifying processes of this process: one more than cores, so that a slow one leaves a core's worth."""
    return Workers(_start, len(os.sched_getaffinity(0)) + 1)


def _start(number: int) -> Child:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return spawn([sys.executable, "-m", "inference.graders.worker"], environment)
