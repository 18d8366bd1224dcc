"""No attempt to escape or to cheat earns anything, breaks the sandbox, or leaves a trace for the next program."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.sandbox.sandbox import Sandbox
from tests.escape.attempts import ATTEMPTS, MARK, REACH
from tests.escape.play import LIMITS, PATIENT, descendants, host, play, serves_on, succeeds_outside

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def bait() -> Iterator[None]:
    with host():
        yield


@pytest.fixture(scope="module")
def used(sandbox: Sandbox) -> tuple[Sandbox, set[int]]:
    """A sandbox that has served, and the processes that there are then."""
    assert asyncio.run(serves_on(sandbox))
    return sandbox, set(descendants(os.getpid()))


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_earns_nothing_and_the_sandbox_serves_on(used: tuple[Sandbox, set[int]], name: str):
    sandbox, before = used
    limits = PATIENT if name in REACH else LIMITS
    reward, verdicts = asyncio.run(play(sandbox, ATTEMPTS[name].source, limits))
    assert reward == 0.0
    assert not any(verdict.passed for verdict in verdicts.values())
    if name in REACH:  # it ran to its end and did not get there
        assert {MARK in str(verdict.why) for verdict in verdicts.values()} == {True}
    assert asyncio.run(serves_on(sandbox))
    _gone(before)


@pytest.mark.parametrize("name", [name for name, attempt in ATTEMPTS.items() if attempt.control])
def test_the_same_attempt_succeeds_without_a_sandbox(name: str, tmp_path: Path):
    assert succeeds_outside(ATTEMPTS[name].source, tmp_path)


def _gone(before: set[int]) -> None:
    """No process is left but those of `before`; the keeper ends a moment after its answer."""
    deadline = time.monotonic() + 60
    while left := set(descendants(os.getpid())) - before:
        assert time.monotonic() < deadline, f"processes {left} are left over"
        time.sleep(0.001)
