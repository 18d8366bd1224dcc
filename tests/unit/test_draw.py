"""Which task is drawn."""

from collections import Counter

import pytest

from flows.steps.difficulty import Posterior
from flows.steps.draw import Choice, Deal, Difficulty, dealt, draw
from schemas.errors import SettingsError
from schemas.ids import task_id
from schemas.settings import Curate, Family

CURATE = Curate(hopeless_below=0.05, hard_below=0.4, mastered_above=0.95, posterior_discount=0.9)
FAMILIES = (Family(name="add", num_tasks=10), Family(name="sub", num_tasks=10))  # 8 to train on, 2 held out
HOPELESS, HARD, MASTERED = Posterior(1, 99, 5), Posterior(20, 80, 5), Posterior(99, 1, 5)


def choices(
    count: int,
    posteriors: dict[str, Posterior] | None = None,
    *,
    families: tuple[Family, ...] = FAMILIES,
    weights: dict[str, float] | None = None,
    exploration: float = 0.1,
    busy: frozenset[str] = frozenset(),
    version: int = 5,
    seed: int = 0,
) -> list[Choice]:
    difficulty = Difficulty(posteriors or {}, version, CURATE)
    deal = Deal(weights or {}, exploration)
    return [draw(seed, number, families, difficulty, deal, busy=busy) for number in range(count)]


def everything(family: str, posterior: Posterior) -> dict[str, Posterior]:
    return {task_id(family, i): posterior for i in range(10)}


def by_family(found: list[Choice]) -> Counter[str]:
    return Counter(c.family.name for c in found)


def test_a_draw_is_a_function_of_seed_and_number() -> None:
    assert choices(50) == choices(50)
    assert choices(50) != choices(50, seed=1)


def test_held_out_tasks_are_never_drawn() -> None:
    assert {c.task_index for c in choices(2000)} == set(range(8))


def test_hard_tasks_are_drawn_twice_as_often() -> None:
    found = choices(9000, everything("sub", HARD), exploration=0)
    assert by_family(found)["sub"] / by_family(found)["add"] == pytest.approx(2, abs=0.15)


@pytest.mark.parametrize("posterior", [HOPELESS, MASTERED])
def test_hopeless_and_mastered_tasks_rest_but_are_tried_now_and_then(posterior: Posterior) -> None:
    found = by_family(choices(8000, everything("sub", posterior), exploration=0))
    assert found["sub"] / found["add"] == pytest.approx(0.05, abs=0.02)


def test_every_family_is_dealt_again_within_the_stated_bound_however_hopeless() -> None:
    # an outage scored all of `sub` 0; 2 families, exploration 0.1: at least once in 2 / 0.1 = 20 draws
    found = choices(200, everything("sub", HOPELESS), weights={"sub": 0.0})
    for start in range(180):
        assert any(c.family.name == "sub" for c in found[start : start + 20])


def test_exploring_draws_say_so() -> None:
    assert [c.reason for c in choices(21)] == [*["exploration", *[None] * 9] * 2, "exploration"]


def test_evidence_that_faded_lets_a_hopeless_task_be_normal_again() -> None:
    task = {"add/0": Posterior(1, 41, 5)}
    assert Difficulty(task, 5, CURATE).weight("add/0") == 0.05
    # 40 failures keep 40 * 0.9^20 = 4.9: mean 1 / 6.9 = 0.145, hard
    assert Difficulty(task, 25, CURATE).weight("add/0") == 2
    assert Difficulty(task, 60, CURATE).weight("add/0") == 1


def test_directives_scale_the_settings_weights() -> None:
    found = by_family(choices(8000, weights={"sub": 3.0}, exploration=0))
    assert found["sub"] / found["add"] == pytest.approx(3, abs=0.25)


def test_a_family_of_weight_zero_in_the_settings_is_never_dealt() -> None:
    families = (FAMILIES[0], Family(name="off", weight=0))
    assert by_family(choices(300, families=families, weights={"off": 9.0})) == {"add": 300}


def test_busy_tasks_are_left_out_while_there_are_others() -> None:
    busy = frozenset(task_id(f, i) for f in ("add", "sub") for i in range(8)) - {"add/3", "sub/4"}
    assert {task_id(c.family.name, c.task_index) for c in choices(100, busy=busy)} == {"add/3", "sub/4"}


def test_a_draw_succeeds_even_when_every_task_is_busy() -> None:
    busy = frozenset(task_id(f, i) for f in ("add", "sub") for i in range(8))
    assert len(choices(5, busy=busy)) == 5


def test_settings_without_a_task_to_deal_are_refused() -> None:
    with pytest.raises(SettingsError, match="none of 2 families"):
        dealt([Family(name="off", weight=0), Family(name="held", held_out_ratio=1.0)])
