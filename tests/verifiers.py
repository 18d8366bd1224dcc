"""Verifiers for tests of their limit."""

import os
import time

from inference.graders.boxed import grade_boxed


def grade(text: str, expected: str) -> float:
    """Grades, but never ends for a text that says so."""
    while "for ever" in text:
        pass
    return grade_boxed(text, expected)


def slow(seconds: float) -> float:
    time.sleep(seconds)
    return 1.0


def fails(*arguments: object) -> None:
    raise LookupError("no such reference")


def dies() -> None:
    os._exit(1)


def seven(*arguments: object) -> float:
    return 7.0


def reads(output: str, task: dict) -> float:
    return 10 * len(output.strip()) + task["index"]
