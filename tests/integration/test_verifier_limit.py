"""A verifier's limit holds in any thread and in asyncio, counts the grading alone, and uses up no worker.

verl-project/verl#3407, PrimeIntellect-ai/verifiers#831.
"""

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inference.environments.base import ENVIRONMENTS, Environment, Message, Score
from inference.graders.limited import VerifierError, limited
from schemas.trajectory import Trajectory
from tests.unit.test_agent import LIMITS, _engine, _episode, _task

pytestmark = pytest.mark.timeout(120)

RIGHT = r"\boxed{\frac{1}{3}}"
LIMIT_S = 2.0


class Boxed(Environment):
    """One question, graded with a limit."""

    score_timeout_s = 100

    def reset(self, seed: int) -> list[Message]:
        return [{"role": "user", "content": "1/3?"}]

    async def score(self, answer: str) -> Score:
        return Score(await limited("tests.verifiers:grade", answer, "1/3", limit_s=LIMIT_S))


def build_boxed(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Environment:
    return Boxed()


@pytest.fixture
def boxed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "desk", "tests.integration.test_verifier_limit:build_boxed")


def test_one_grading_that_takes_for_ever_costs_its_episode_alone(boxed_environment: None):
    texts = [RIGHT] * 50 + [f"for ever {RIGHT}"] + [RIGHT] * 49

    async def play_all() -> list[Trajectory]:
        return await asyncio.gather(*(_episode(_engine(text), _task(), LIMITS) for text in texts))

    rows = asyncio.run(play_all())
    slow = rows.pop(50)
    assert [row.reward for row in rows] == [1.0] * 99
    assert (slow.status, slow.error_kind, slow.reward) == ("failed", "verifier", None)
    assert slow.error == "VerifierError: tests.verifiers:grade took longer than 2 s"


def test_the_limit_holds_in_threads_too():
    def grade(text: str) -> float | None:
        try:
            return asyncio.run(limited("tests.verifiers:grade", text, "1/3", limit_s=LIMIT_S))
        except VerifierError:
            return None

    with ThreadPoolExecutor(20) as threads:
        rewards = list(threads.map(grade, [RIGHT] * 50 + ["for ever"] + [RIGHT] * 49))
    assert rewards == [1.0] * 50 + [None] + [1.0] * 49


def test_slow_gradings_use_up_no_worker():
    """More of them than there are workers, then an ordinary one."""

    async def grade() -> float:
        late = [limited("tests.verifiers:grade", "for ever", "1/3", limit_s=0.2) for _ in range(12)]
        results = await asyncio.gather(*late, return_exceptions=True)
        assert {type(result) for result in results} == {VerifierError}
        return await limited("tests.verifiers:grade", RIGHT, "1/3", limit_s=LIMIT_S)

    assert asyncio.run(grade()) == 1.0


def test_waiting_for_a_turn_is_not_part_of_the_limit():
    """320 of 0.01 s a worker, all at once, take 3 s; none may take 2 s."""
    number = 320 * (len(os.sched_getaffinity(0)) + 1)

    async def burst() -> list[float]:
        return await asyncio.gather(*(limited("tests.verifiers:slow", 0.01, limit_s=2) for _ in range(number)))

    assert asyncio.run(burst()) == [1.0] * number


@pytest.mark.parametrize(
    ("verifier", "says"),
    [
        ("tests.verifiers:fails", "LookupError: no such reference"),
        ("tests.verifiers:dies", "process of tests.verifiers:dies broke"),
        ("tests.verifiers:missing", "AttributeError"),
        ("no_such_module:f", "ModuleNotFoundError"),
    ],
)
def test_a_verifier_that_fails_is_an_error_and_no_reward(verifier: str, says: str):
    with pytest.raises(VerifierError, match=says):
        asyncio.run(limited(verifier, limit_s=20))
    assert asyncio.run(limited("tests.verifiers:slow", 0, limit_s=20)) == 1.0
