"""Whether one evaluation is better than others by more than chance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from inference.significance import clearest, mcnemar, one_sided
from schemas.messages import EvalResult
from tests.evaluations import outcome


def test_mcnemar_by_hand() -> None:
    assert mcnemar(5, 0) == 1 / 32
    assert mcnemar(4, 1) == (5 + 1) / 32
    assert mcnemar(12, 1) == (13 + 1) / 8192
    assert mcnemar(1, 12) == (8192 - 1) / 8192
    assert mcnemar(0, 0) == 1.0


@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_the_sign_test_of_the_tasks_that_differ(won: int, lost: int) -> None:
    expected = binomtest(won, won + lost, alternative="greater").pvalue if won + lost else 1.0
    assert mcnemar(won, lost) == pytest.approx(expected, rel=1e-9)


def test_two_standard_errors_are_two_and_a_quarter_percent() -> None:
    assert one_sided(2.0) == pytest.approx(0.02275, abs=1e-5)
    assert one_sided(0.0) == 0.5


@pytest.mark.parametrize(
    ("better", "worse", "how"),
    [
        (outcome(1, add="111100"), outcome(2, add="000010"), "McNemar's test, 4 tasks to 1, p 0.19 of 1 compared"),
        (outcome(1, add="11", chain="10"), outcome(2, add="01", chain="00"), "McNemar's test, 2 tasks to 0, p 0.25"),
        # one without a score is no pair, nor is one that only a full evaluation played, nor a family that is new
        (outcome(1, add="11-1"), outcome(2, add="-000"), "McNemar's test, 2 tasks to 0, p 0.25 of 1 compared"),
        (outcome(1, add="110111"), outcome(2, add="001"), "McNemar's test, 2 tasks to 1, p 0.5 of 1 compared"),
        (outcome(1, add="11", old="111"), outcome(2, add="00", new="000"), "McNemar's test, 2 tasks to 0, p 0.25"),
    ],
)
def test_evaluations_are_compared_on_the_tasks_that_both_scored(
    better: EvalResult, worse: EvalResult, how: str
) -> None:
    assert clearest([(better, worse)]).how.startswith(how)


def test_results_from_before_outcomes_were_kept_are_compared_by_their_scores() -> None:
    old = outcome(1, add="1" * 80 + "0" * 20)
    old = old.model_copy(update={"families": {"add": old.families["add"].model_copy(update={"by_task": ""})}})
    found = clearest([(old, outcome(2, add="1" * 60 + "0" * 40))])
    # pooled 0.7, error √(0.7 * 0.3 * 0.02) = 0.0648, z 3.09
    assert found.how == "z of two proportions 3.09, p 0.001 of 1 compared"
    assert found.p == pytest.approx(0.00101, abs=1e-5)


def test_the_clearest_of_several_pays_for_the_choice() -> None:
    worse = outcome(9, add="0" * 10)
    better = [outcome(1, add="1100000000"), outcome(2, add="1111110000"), outcome(3, add="1110000000")]
    found = clearest((each, worse) for each in better)
    assert (found.better, found.worse) == (better[1], worse)
    assert found.p == 3 / 64
    assert clearest([(worse, each) for each in better]).p == 1.0
