r"""Numbers in plain text and LaTeX as exact fractions: `-1,234.5`, `3/4`, `1 3/4`, `\frac{1}{2}`, `1.5\times10^{3}`.

What is accepted is short and holds small exponents, so that no text makes grading slow.
"""

import re
from fractions import Fraction

MAX_LENGTH = 200
"""Characters of a number. A longer text is none."""

_DECIMAL = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:[eE][-+]?\d{1,3})?|\.\d+(?:[eE][-+]?\d{1,3})?", re.ASCII)
_POWER = re.compile(r"(?:\\times|\\cdot|\*|x|\xd7) *10(?:\^|\*\*) *(?:\{ *([-+]?\d{1,3}) *\}|([-+]?\d{1,3}))", re.ASCII)
_FRAC = re.compile(r"\\[dtc]?frac")
_DECORATION = re.compile(r"\\[,!;: ]|\\left|\\right|\\?\$")
_MINUS = str.maketrans({"−": "-", "–": "-", "\N{NO-BREAK SPACE}": " "})  # noqa: RUF001


def number(text: str) -> Fraction | None:
    """The number that all of `text` is, exactly; None if it is none (NaN and infinity are none)."""
    if len(text) > MAX_LENGTH:
        return None
    plain = _DECORATION.sub("", text.translate(_MINUS).replace("{,}", ",")).strip().rstrip(".")
    reader = _Reader(plain)
    try:
        value = reader.value()
    except (ValueError, ZeroDivisionError):
        return None
    return value if reader.at_end() else None


def same_number(answer: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether both are numbers and differ by at most `tolerance` times the expected one; 0 is exact."""
    one, other = number(answer), number(expected)
    if one is None or other is None:
        return False
    return abs(one - other) <= Fraction(tolerance) * abs(other)


class _Reader:
    """Recursive descent over one number."""

    def __init__(self, text: str):
        self.text, self.at = text, 0

    def value(self) -> Fraction:
        """A sign, an atom, and what may follow it."""
        sign = -1 if self._take("-") else 1
        if sign == 1:
            self._take("+")
        value = self._fraction()
        if power := self._match(_POWER):
            value *= Fraction(10) ** int(power[1] or power[2])
        return sign * (value / 100 if self._take("\\%") or self._take("%") else value)

    def at_end(self) -> bool:
        """Whether nothing is left."""
        return not self.text[self.at :].strip()

    def _fraction(self) -> Fraction:
        r"""`a`, `a/b`, `a b/c` or `a \frac{b}{c}`."""
        begin = self.at
        whole = self._atom()
        if self._take("/"):
            return whole / self._atom()
        if not self.text[begin : self.at].strip().isdigit():
            return whole
        if _FRAC.match(self.text, self._skip()):
            return whole + self._atom()
        if mixed := self._match(re.compile(r"(?<= )(\d+) */ *(\d+)", re.ASCII)):
            return whole + Fraction(int(mixed[1]), int(mixed[2]))
        return whole

    def _atom(self) -> Fraction:
        if self._match(_FRAC):
            above, below = self._argument(), self._argument()
            return above / below
        for opening, closing in ("{}", "()"):
            if self._take(opening):
                value = self.value()
                self._expect(closing)
                return value
        decimal = self._match(_DECIMAL)
        if decimal is None:
            raise ValueError(f"no number at {self.at}")
        return Fraction(decimal[0].replace(",", ""))

    def _argument(self) -> Fraction:
        """Of a LaTeX command: a group in braces, or one digit."""
        if self._take("{"):
            value = self.value()
            self._expect("}")
            return value
        digit = self._match(re.compile(r"\d", re.ASCII))
        if digit is None:
            raise ValueError(f"no argument at {self.at}")
        return Fraction(int(digit[0]))

    def _skip(self) -> int:
        while self.text[self.at : self.at + 1] == " ":
            self.at += 1
        return self.at

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self._skip())
        if match:
            self.at = match.end()
        return match

    def _take(self, text: str) -> bool:
        found = self.text.startswith(text, self._skip())
        self.at += len(text) if found else 0
        return found

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise ValueError(f"no {text} at {self.at}")
