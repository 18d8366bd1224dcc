r"""Answers in a LaTeX box: the last `\boxed{...}` or `\fbox{...}` of a text, with its braces balanced."""

import re

from inference.graders.numbers import same_number

_BOX = re.compile(r"\\(?:boxed|fbox) *\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FORMATTING = re.compile(r"\\(?:text|mathrm|textbf) *\{([^{}]*)\}|\\left|\\right|\\[,!;: ]|\$|\s")


def boxed(text: str) -> str | None:
    """What stands in the last box; None without a box, or when the last one is not closed (the text was cut off)."""
    start = None
    for box in _BOX.finditer(text):
        start = box.end()
    if start is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace is text
        if depth == 0:
            return text[start : brace.start()].strip()
    return None


def same_answer(answer: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether two answers are the same number, or else the same text but for formatting."""
    return same_number(answer, expected, tolerance) or _plain(answer) == _plain(expected) != ""


def grade_boxed(text: str, expected: str, tolerance: float = 0.0) -> float:
    """1.0 if the last box of `text` holds `expected`, else 0.0."""
    found = boxed(text)
    return float(found is not None and same_answer(found, expected, tolerance))


def _plain(text: str) -> str:
    return _FORMATTING.sub(r"\1", text).rstrip(".")
