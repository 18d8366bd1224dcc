"""The calculator's questions: kinds of arithmetic, and numbered tasks that never repeat one."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from inference.environments.distinct import Distinct
from schemas.errors import SettingsError

PREVIOUS = "R"
"""In a plan: the result of the call before."""

_MAX_REPEATS = 20_000
"""Repeats in a row after which a kind counts as exhausted."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answer, and the calculator calls that lead there (none where no call helps)."""

    text: str
    answer: str
    plan: tuple[str, ...] = ()


def _two_digits(rng: random.Random) -> int:
    return rng.randint(10, 99)


def _add(rng: random.Random) -> Question:
    a, b = _two_digits(rng), rng.randint(1, 9)
    return Question(f"compute {a}+{b}", str(a + b), (f"{a}+{b}",))


def _flaky(rng: random.Random) -> Question:
    a, b = _two_digits(rng), _two_digits(rng)
    return Question(f"compute {a}+{b}", str(a + b), (f"{a}+{b}",))


def _muladd(rng: random.Random) -> Question:
    a, b, c = (rng.randint(2, 9) for _ in range(3))
    return Question(f"compute {a}+{b}*{c}", str(a + b * c), (f"{b}*{c}", f"{a}+{PREVIOUS}"))


def _chain(rng: random.Random) -> Question:
    a, b = _two_digits(rng), _two_digits(rng)
    c = rng.randint(10, min(99, a + b))
    return Question(f"compute {a}+{b}-{c}", str(a + b - c), (f"{a}+{b}", f"{PREVIOUS}-{c}"))


def _larger(rng: random.Random) -> Question:
    a, b = rng.sample(range(10, 100), 2)
    return Question(f"larger of {a} and {b}", str(max(a, b)))


def _secret(rng: random.Random) -> Question:
    shown = rng.randint(1000, 9999)
    answer = 1000 + (shown - 1000 + rng.randint(1, 8999)) % 9000  # any other number of four digits
    return Question(f"secret of {shown}", str(answer))


KINDS: dict[str, Callable[[random.Random], Question]] = {
    "add": _add,  # ab+c: one call
    "muladd": _muladd,  # a+b*c: two calls, the product first
    "chain": _chain,  # ab+cd-ef: two calls
    "larger": _larger,  # of two numbers: no call helps
    "flaky": _flaky,  # ab+cd: one call of a tool that fails
    "secret": _secret,  # impossible: nothing reveals the answer
}


def question(kind: str, family: str, index: int, seed: int) -> Question:
    """Question `index` of `family`: the same in every process, and no two indices share a text.

    Raises:
        SettingsError: the kind has fewer questions than that.
    """
    questions = _questions(kind, family, seed)
    if (found := questions.get(index)) is None:
        raise SettingsError(f"family {family}: kind {kind} has {len(questions)} questions; lower its num_tasks")
    return found


@lru_cache(maxsize=256)
def _questions(kind: str, family: str, seed: int) -> Distinct[Question]:
    rng = random.Random(f"questions/{kind}/{family}/{seed}")
    return Distinct((KINDS[kind](rng) for _ in count()), lambda q: q.text, _MAX_REPEATS)
