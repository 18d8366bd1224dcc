"""Reasoning Gym with its real package: right answers earn 1, wrong ones less, broken scorers nothing."""

import asyncio
import subprocess
import sys

import pytest

from inference.environments.base import build
from inference.environments.reasoning_gym import ReasoningGym, generate, grade
from schemas.errors import SettingsError
from tests.episodes import engine, episode, task

pytest.importorskip("reasoning_gym", reason="the package reasoning-gym is not installed")

FAMILIES = {
    "chain_sum": {"min_terms": 2, "max_terms": 3},
    "leg_counting": {},
    "countdown": {"min_numbers": 3, "max_numbers": 4},
    "spell_backward": {"max_word_len": 5},
    "gsm_symbolic": {},
}


def _made(dataset: str, index: int, seed: int = 0) -> ReasoningGym:
    made = build("reasoning-gym", dataset, index, seed, {"config": FAMILIES[dataset], "score_s": 200})
    assert isinstance(made, ReasoningGym)
    return made


def _right(environment: ReasoningGym, dataset: str) -> str:
    return generate(dataset, FAMILIES[dataset], environment.task_seed)[1]["answer"]


@pytest.mark.timeout(240)
def test_right_answers_of_several_families_earn_1_and_wrong_ones_less():
    async def rewards(dataset: str) -> list[float]:
        environment = _made(dataset, 3)
        right = f"so <answer>0</answer>, no: <answer> {_right(environment, dataset)}\n</answer>"
        said = (right, "<answer>zzz</answer>", _right(environment, dataset), "")
        return [(await environment.score(answer)).reward for answer in said]

    async def run() -> None:
        for dataset in FAMILIES:
            right, wrong, untagged, empty = await rewards(dataset)
            assert (right, untagged, empty) == (1.0, 0.0, 0.0)
            assert wrong < 1

    asyncio.run(run())


def test_a_task_depends_on_family_index_and_seed_alone():
    prompts = {key: _made("chain_sum", *key).reset(9)[0]["content"] for key in [(0, 0), (1, 0), (0, 1)]}
    assert len(set(prompts.values())) == 3
    assert _made("chain_sum", 1).reset(4)[0]["content"] == prompts[1, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": "chain_sums"}, "no data set 'chain_sums'.*chain_sum, "),
        ({"dataset": "chain_sum", "config": {"min_terms": -1}}, "refuses"),
        ({"dataset": "chain_sum", "config": {"terms": 3}}, "refuses"),
        ({"dataset": "chain_sum", "config": {"seed": 3}}, "seed, which the task sets"),
        ({"dataset": "chain_sum", "level": 3}, "level"),
    ],
)
def test_wrong_options_stop_a_service_at_its_start(options, words):
    with pytest.raises(SettingsError, match=words):
        build("reasoning-gym", "puzzles", 0, 0, options)


@pytest.mark.parametrize(("scorer", "words"), [("fails", "no such reference"), ("seven", "gave 7.0")])
def test_a_broken_scorer_is_the_infrastructures_failure(monkeypatch, scorer, words):
    monkeypatch.setattr(ReasoningGym, "verifier", f"tests.verifiers:{scorer}")
    row = asyncio.run(episode(task("reasoning-gym", "leg_counting", score_s=200), engine("<answer>4</answer>")))
    assert (row.status, row.error_kind, row.reward) == ("failed", "verifier", None)
    assert words in (row.error or "")


@pytest.mark.parametrize(
    ("dataset", "answers"),
    [
        ("prime_factorization", ["I do not know", "", "1/0", "\ud800"]),
        ("game_of_life", ["{}", "[[1]]", "9" * 400]),
        ("boxnet", ["-1", "null", "[[1]]"]),
    ],
)
def test_an_answer_over_which_the_scorer_breaks_is_a_wrong_answer(dataset: str, answers: list[str]):
    assert [grade(dataset, {}, 5, answer) < 0.1 for answer in answers] == [True] * len(answers)


def test_a_scorer_that_breaks_over_the_right_answer_too_is_broken(monkeypatch):
    class Broken:
        def score_answer(self, answer: str, entry: object) -> float:
            raise LookupError(f"no reference for {answer}")

    monkeypatch.setattr("inference.environments.reasoning_gym.generate", lambda *_: (Broken(), {"answer": "right"}))
    with pytest.raises(LookupError, match="for right"):
        grade("any", {}, 0, "odd")


def test_the_package_is_imported_by_its_families_alone():
    code = "import sys, inference.serve, inference.environments.reasoning_gym; print('reasoning_gym' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
