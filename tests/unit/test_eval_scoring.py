"""Scores of evaluations: who is in the denominator, what the bounds are, who may lead, which version is judged."""

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.eval_plan import Job, full, held_out_tasks, light, training_tasks, without_held_out
from inference.scoring import by_family, leads, tally, two_proportion_z, wilson
from schemas.names import ErrorKind, Origin, Status
from schemas.settings import Settings
from schemas.trajectory import Trajectory
from tests.evaluations import evaluated
from tests.rollout_fakes import NOW, episode, task

RIGHT, WRONG = {"reward": 1.0}, {"reward": 0.0}


def _episodes(kind: ErrorKind, reward: float | None) -> list[Trajectory]:
    """108 right, 40 wrong, 24 that ended in `kind`."""
    ended = {"status": Status.FAILED, "error_kind": kind, "reward": reward}
    return [episode(task(), **f) for f in [RIGHT] * 108 + [WRONG] * 40 + [ended] * 24]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ErrorKind.AGENT_TIMEOUT, ErrorKind.TOOL_ERROR, ErrorKind.MALFORMED_CALL])
@pytest.mark.parametrize("reward", [0.0, None])
def test_failures_of_the_agent_count_as_wrong(kind: ErrorKind, reward: float | None) -> None:
    counts = tally(_episodes(kind, reward), 1.0)
    assert counts.score == pytest.approx(108 / 172)  # 0.628
    assert (counts.num_scored, counts.num_unscored, counts.reason) == (172, 0, None)


@pytest.mark.parametrize("kind", [ErrorKind.ENVIRONMENT, ErrorKind.VERIFIER, ErrorKind.ENGINE, ErrorKind.SHUTDOWN])
@pytest.mark.parametrize("reward", [None, 0.0])  # 0.0: a broken judge's default
def test_failures_of_the_infrastructure_are_named_and_left_out(kind: ErrorKind, reward: float | None) -> None:
    counts = tally(_episodes(kind, reward), 1.0)
    assert counts.score == pytest.approx(108 / 148)  # 0.730
    assert (counts.num_scored, counts.num_unscored) == (148, 24)
    assert counts.reason == f"24 of 172 unscored: 24 {kind}"


def test_too_many_unscored_keep_a_version_from_becoming_champion() -> None:
    champion = evaluated(1, 100, 172)
    better = evaluated(2, 108, 148, num_unscored=24)  # 24 of 172 = 0.14
    assert not leads(better, champion, max_unscored_ratio=0.1)
    assert leads(better, champion, max_unscored_ratio=0.14)
    assert not leads(better, None, max_unscored_ratio=0.1)


def test_a_champion_leads_by_its_lower_bound_so_that_luck_in_few_episodes_does_not() -> None:
    sure, lucky = evaluated(1, 144, 160), evaluated(2, 10, 10)
    assert leads(sure, None, 0.1)
    assert not leads(lucky, sure, 0.1)
    assert leads(evaluated(3, 152, 160), sure, 0.1)


def test_a_version_without_a_score_leads_nothing() -> None:
    assert not leads(evaluated(1, 0, 0), None, 1.0)


def test_scores_are_kept_by_family() -> None:
    lost = {"status": Status.FAILED, "error_kind": ErrorKind.ENGINE, "reward": None}
    rows = [
        episode(task(family="add"), reward=1.0),
        episode(task(family="add"), reward=0.0),
        episode(task(family="chain"), **lost),  # type: ignore[arg-type]
    ]
    scores = by_family(rows, 1.0)
    assert (scores["add"].score, scores["add"].num_scored) == (0.5, 2)
    assert (scores["chain"].score, scores["chain"].num_scored, scores["chain"].num_unscored) == (None, 0, 1)


def test_outcomes_are_kept_by_task_in_the_order_of_the_tasks() -> None:
    lost = {"status": Status.FAILED, "error_kind": ErrorKind.ENGINE, "reward": None}
    wrong = {"status": Status.FAILED, "error_kind": ErrorKind.AGENT_TIMEOUT, "reward": None}
    ends = [("add", RIGHT), ("chain", RIGHT), ("add", lost), ("add", WRONG), ("chain", wrong), ("add", RIGHT)]
    scores = by_family([episode(task(family=family), **end) for family, end in ends], 1.0)  # type: ignore[arg-type]
    assert {name: score.by_task for name, score in scores.items()} == {"add": "1-01", "chain": "10"}


def test_wilson_interval_by_hand() -> None:
    # n 10, p 0.5, z² 3.8415: (0.5 + 0.19207 ± 1.96 √(0.025 + 0.0096036)) / 1.38415 = (0.69207 ± 0.36459) / 1.38415
    low, high = wilson(5, 10)
    assert (low, high) == (pytest.approx(0.23659, abs=1e-4), pytest.approx(0.76341, abs=1e-4))
    low, high = wilson(0, 10)
    assert low == pytest.approx(0, abs=1e-12)
    assert high == pytest.approx(3.84146 / 13.84146, abs=1e-5)  # z² / (n + z²)


@given(st.integers(0, 500), st.integers(1, 500))
def test_wilson_interval_holds_the_score_and_mirrors(successes: int, num_trials: int) -> None:
    successes = min(successes, num_trials)
    low, high = wilson(successes, num_trials)
    assert 0 <= low <= successes / num_trials + 1e-12
    assert successes / num_trials - 1e-12 <= high <= 1
    mirrored = wilson(num_trials - successes, num_trials)
    assert mirrored == (pytest.approx(1 - high, abs=1e-9), pytest.approx(1 - low, abs=1e-9))


def test_two_proportion_z_by_hand() -> None:
    # 0.8 and 0.6 of 100: pooled 0.7, error √(0.21 * 0.02) = 0.0648, z 3.086
    assert two_proportion_z(0.8, 100, 0.6, 100) == pytest.approx(0.2 / math.sqrt(0.0042))
    assert two_proportion_z(1.0, 10, 1.0, 20) == 0.0


def test_versions_published_faster_than_an_eval_takes_get_one_full_eval_and_skips() -> None:
    """A full evaluation is due every 25; 25 itself is overtaken by 26 (PrimeIntellect-ai/prime-rl#1903)."""
    assert full([24, 25, 26], last=0, every=25) == Job(26, "full")
    assert full([24, 25], last=0, every=25) == Job(25, "full")
    assert full([24, 25, 26, 27], last=26, every=25) is None
    assert full([49, 76], last=26, every=25) == Job(76, "full")
    assert full([], last=0, every=25) is None


def test_every_version_has_a_light_eval_or_is_passed_over_by_name() -> None:
    assert light([1, 2, 3], last=0) == Job(3, "light", (1, 2))
    assert light([1, 2, 3], last=2) == Job(3, "light")
    assert light([1, 2, 3], last=3) is None


def test_episodes_that_return_are_whole_groups_of_training_tasks_new_ones_for_each_version() -> None:
    families = [{"name": "add", "num_tasks": 5, "held_out_ratio": 0.4}, {"name": "off", "weight": 0}]
    evaluator = {"train_groups_per_family": 2}
    settings = Settings.model_validate({"families": families, "evaluator": evaluator, "loop": {"group_size": 4}})
    # 3 tasks are trained on: version 0 takes draws 0 and 1, version 1 draws 2 and 3, which begins anew
    drawn = [[(t.index, t.draw) for t in training_tasks(settings, version, NOW)] for version in range(3)]
    assert drawn == [[(0, 0), (1, 0)], [(2, 0), (0, 1)], [(1, 1), (2, 1)]]
    tasks = [task for version in range(100) for task in training_tasks(settings, version, NOW)]
    assert {task.index for task in tasks} == {0, 1, 2}
    assert {(task.origin, task.group_size) for task in tasks} == {(Origin.EVAL, 4)}
    assert len({task.group_id for task in tasks}) == 200
    assert not {task.group_id for task in tasks} & {task.group_id for task in held_out_tasks(settings, 50, NOW)}
    assert training_tasks(Settings.model_validate({"families": families}), 1, NOW) == []


def test_every_version_is_evaluated_on_the_same_held_out_tasks_with_the_same_seeds() -> None:
    families = [
        {"name": "add", "num_tasks": 10, "held_out_ratio": 0.3},
        {"name": "all", "num_tasks": 10, "held_out_ratio": 0.0},
    ]
    settings = Settings.model_validate({"families": families, "run": {"seed": 5}})
    tasks = held_out_tasks(settings, 5, NOW)
    assert [(t.family, t.index, t.draw, t.seed, t.origin) for t in tasks] == [
        ("add", 7, 0, 5, Origin.EVAL),
        ("add", 8, 0, 5, Origin.EVAL),
        ("add", 9, 0, 5, Origin.EVAL),
        ("add", 7, 1, 5, Origin.EVAL),
        ("add", 8, 1, 5, Origin.EVAL),
    ]
    assert len({t.group_id for t in tasks}) == 5  # sampling seeds come from it
    assert held_out_tasks(settings, 9, NOW)[:5] == tasks  # a full evaluation begins with those of a light one
    assert [t.group_id for t in held_out_tasks(settings, 5, datetime.now(UTC))] == [t.group_id for t in tasks]
    assert without_held_out(settings.families) == ["all"]
