"""What scores are answered with."""

import pytest

from inference.steering import LOW_WEIGHT, RECENT, Order, Steering, family_weights
from schemas.messages import EvalResult, FamilyScore
from schemas.settings import Settings
from tests.evaluations import evaluated, outcome

SETTINGS = Settings()
RECENT_UP = {"bucket_weights": (4.0, 1.0, 1.0, 1.0)}
AS_BEFORE = {"bucket_weights": (1.0, 1.0, 1.0, 1.0)}


def _result(version: int, score: float, n: int = 100, families: dict[str, float | None] | None = None) -> EvalResult:
    scores = {k: FamilyScore(score=s, num_scored=20, num_unscored=0) for k, s in (families or {}).items()}
    return evaluated(version, round(score * n), n, families=scores)


def _changes(orders: list[Order]) -> list[tuple[str, object]]:
    return [(o.target, o.changes) for o in orders]


def test_a_significant_fall_is_answered_once_and_taken_back_on_recovery() -> None:
    steering = Steering(SETTINGS)
    assert steering.judge(_result(1, 0.8)) == []
    # 0.8 to 0.68 of 100: pooled 0.74, error √(0.74 * 0.26 * 0.02) = 0.0620, z 1.93, p 0.027: not below 0.023
    assert steering.judge(_result(2, 0.68)) == []
    # 0.8 to 0.6: pooled 0.7, error 0.0648, z 3.09, p 0.001, twice that of two
    orders = steering.judge(_result(3, 0.6))
    assert _changes(orders) == [("learner", RECENT_UP | {"learning_rate_scale": 0.5}), ("curate", RECENT_UP)]
    assert orders[0].reason == (
        "version 3 (0.600 of 100) fell below version 1 (0.800 of 100): "
        "z of two proportions 3.09, p 0.002 of 2 compared, is below 0.023"
    )
    assert steering.judge(_result(4, 0.6)) == []  # answered already
    assert steering.judge(_result(5, 0.68)) == []  # 4 * 0.027 = 0.11: better, not yet back
    orders = steering.judge(_result(6, 0.78))
    assert _changes(orders) == [("learner", AS_BEFORE | {"learning_rate_scale": 1.0}), ("curate", AS_BEFORE)]
    assert not steering.fallen
    # 0.8 to 0.78: pooled 0.79, error √(0.79 * 0.21 * 0.02) = 0.0576, z 0.35, p 0.36; one error is 0.16
    assert orders[0].reason == (
        "version 6 (0.780 of 100) recovered to version 1 (0.800 of 100): "
        "z of two proportions 0.35, p 1 of 5 compared, is above 0.16"
    )


def test_an_answer_is_taken_back_once_the_score_rises_again_and_is_measured_anew_from_there() -> None:
    steering = Steering(SETTINGS)
    steering.judge(_result(1, 0.8))
    steering.judge(_result(2, 0.3))
    # 0.3 to 0.45 is z 2.19, p 0.014, but the result that fell was picked for being low
    assert steering.judge(_result(3, 0.45)) == []
    assert steering.judge(_result(4, 0.3)) == []
    # 0.3 to 0.45 again, of two: 0.028, not below 0.023; 0.8 is still 5.1 errors above
    assert steering.judge(_result(5, 0.45)) == []
    # 0.3 to 0.48: pooled 0.39, error √(0.39 * 0.61 * 0.02) = 0.0690, z 2.61, p 0.0045, of three
    orders = steering.judge(_result(6, 0.48))
    assert _changes(orders) == [("learner", AS_BEFORE | {"learning_rate_scale": 1.0}), ("curate", AS_BEFORE)]
    assert orders[0].reason == (
        "version 6 (0.480 of 100) rose from version 4 (0.300 of 100): "
        "z of two proportions 2.61, p 0.014 of 3 compared, is below 0.023"
    )
    # 0.8 is no measure any more, nor is 0.48, which was picked for being high
    assert steering.judge(_result(7, 0.3)) == []
    assert "fell below version 7 (0.300 of 100)" in steering.judge(_result(8, 0.1))[0].reason


def test_after_a_rise_a_late_result_of_an_older_version_still_gives_no_orders() -> None:
    steering = Steering(SETTINGS)
    for version, score in enumerate((0.8, 0.3, 0.3, 0.6), 1):
        steering.judge(_result(version, score))
    assert not steering.fallen
    assert steering.judge(_result(3, 0.3, families={"add": 0.01})) == []


def test_a_fall_on_the_same_tasks_is_found_where_the_scores_alone_do_not_show_it() -> None:
    # 9 of 100 tasks lost and none gained: p 1/512 = 0.002; two proportions of 0.60 and 0.51 have z 1.28
    before, after = outcome(1, add="1" * 60 + "0" * 40), outcome(2, add="1" * 51 + "0" * 49)
    steering = Steering(SETTINGS)
    steering.judge(before)
    reason = steering.judge(after)[-1].reason
    assert reason == (
        "version 2 (0.510 of 100) fell below version 1 (0.600 of 100): "
        "McNemar's test, 9 tasks to 0, p 0.002 of 1 compared, is below 0.023"
    )
    # the same scores, but 13 tasks lost and 4 gained: p (2380 + 680 + 136 + 17 + 1) / 2^17 = 0.0245
    mixed = Steering(SETTINGS)
    mixed.judge(before)
    assert mixed.judge(outcome(2, add="1" * 47 + "0" * 13 + "1" * 4 + "0" * 36)) == []


def test_a_version_that_is_compared_with_several_has_to_fall_further() -> None:
    # 6 tasks lost and none gained: 1/64 = 0.016 against one version, 0.031 against two
    high, low = "1" * 50 + "0" * 50, "1" * 44 + "0" * 56
    one, two = Steering(SETTINGS), Steering(SETTINGS)
    for steering, versions in ((one, [1]), (two, [1, 2])):
        for version in versions:
            steering.judge(outcome(version, add=high))
        steering.judge(outcome(3, add=low))
    assert one.fallen
    assert not two.fallen


def test_a_late_result_of_an_older_version_gives_no_orders_and_is_compared_with() -> None:
    steering = Steering(SETTINGS)
    steering.judge(_result(25, 0.6))
    assert steering.judge(_result(24, 0.2, families={"add": 0.01})) == []
    assert steering.judge(_result(24, 0.9)) == []  # a full evaluation that took its time
    [order, _] = steering.judge(_result(26, 0.6))
    assert "fell below version 24 (0.900 of 100)" in order.reason


def test_a_fall_in_few_episodes_is_noise() -> None:
    steering = Steering(SETTINGS)
    steering.judge(_result(1, 0.8, n=10))
    assert steering.judge(_result(2, 0.6, n=10)) == []


def test_an_old_best_is_forgotten_so_that_no_answer_lasts_for_ever() -> None:
    steering = Steering(SETTINGS)
    steering.judge(_result(1, 0.9))
    assert len(steering.judge(_result(2, 0.5))) == 2
    answers = [steering.judge(_result(3 + i, 0.5)) for i in range(RECENT)]
    assert [len(a) for a in answers] == [0] * (RECENT - 1) + [2]
    assert answers[-1][0].changes["learning_rate_scale"] == 1.0


def test_families_with_nothing_to_learn_weigh_less_and_middling_ones_more() -> None:
    weights = family_weights(
        {
            "mastered": FamilyScore(score=0.95, num_scored=20, num_unscored=0),
            "hopeless": FamilyScore(score=0.05, num_scored=20, num_unscored=0),
            "half": FamilyScore(score=0.5, num_scored=20, num_unscored=0),
            "good": FamilyScore(score=0.8, num_scored=20, num_unscored=0),
            "unknown": FamilyScore(score=None, num_scored=0, num_unscored=20),
        },
        SETTINGS,
    )
    # ½ + 4 * 0.5 * 0.5 = 1.5; ½ + 4 * 0.8 * 0.2 = 1.14
    assert weights == {"mastered": LOW_WEIGHT, "hopeless": LOW_WEIGHT, "half": 1.5, "good": 1.14}
    assert LOW_WEIGHT > 0


def test_family_weights_are_sent_only_when_they_change_materially() -> None:
    steering = Steering(SETTINGS)
    assert steering.judge(_result(1, 0.5, families={"add": 0.85})) == []  # ½ + 0.51 = 1.01
    [order] = steering.judge(_result(2, 0.5, families={"add": 0.5}))
    assert (order.target, order.changes) == ("dispatch", {"family_weights": {"add": 1.5}})
    assert order.reason == "scores of version 2 change the weight of add 1.5"
    assert steering.judge(_result(3, 0.5, families={"add": 0.7})) == []  # 1.34, of 1.5
    [order] = steering.judge(_result(4, 0.5, families={"add": 0.97}))
    assert order.changes == {"family_weights": {"add": LOW_WEIGHT}}


def test_a_family_that_could_not_be_scored_keeps_its_weight() -> None:
    steering = Steering(SETTINGS)
    steering.judge(_result(1, 0.5, families={"add": 0.5, "chain": 0.5}))
    [order] = steering.judge(_result(2, 0.5, families={"add": 0.99, "chain": None}))
    assert order.changes == {"family_weights": {"add": LOW_WEIGHT, "chain": 1.5}}


def test_a_skipped_version_changes_nothing() -> None:
    skipped = _result(1, 0.5).model_copy(update={"kind": "skipped", "score": None, "num_scored": 0})
    assert Steering(SETTINGS).judge(skipped) == []


@pytest.mark.parametrize("scores", [[0.8, 0.6, 0.8], [0.2, 0.9, 0.1, 0.5, 0.9]])
def test_the_same_results_give_the_same_orders(scores: list[float]) -> None:
    results = [_result(i, s, families={"add": s}) for i, s in enumerate(scores, 1)]
    one, other = Steering(SETTINGS), Steering(SETTINGS)
    assert [one.judge(r) for r in results] == [other.judge(r) for r in results]
