"""Posteriors of tasks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.steps.difficulty import Posterior, counts_for, failed_with_error, is_hard
from schemas.names import Origin
from schemas.settings import Curate

SETTINGS = Curate(hopeless_below=0.05, hard_below=0.4)


def test_an_unknown_task_is_expected_to_succeed_half_the_time() -> None:
    assert Posterior().mean == 0.5


def test_successes_and_failures_add_to_the_prior() -> None:
    found = Posterior().observe(3, 1)
    assert (found.alpha, found.beta, found.num_groups) == (4, 2, 1)
    assert found.mean == pytest.approx(4 / 6)


def test_evidence_fades_with_versions_and_the_prior_does_not() -> None:
    found = Posterior(alpha=5, beta=9, weight_version=2).at(4, discount=0.5)
    assert (found.alpha, found.beta, found.weight_version) == (2, 3, 4)  # 1 + 4/4, 1 + 8/4


def test_an_older_version_changes_nothing() -> None:
    posterior = Posterior(alpha=5, beta=9, weight_version=4)
    assert posterior.at(2, 0.5) == posterior


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.integers(0, 50), st.floats(0, 1))
def test_fading_moves_the_mean_towards_one_half(alpha: float, beta: float, versions: int, discount: float) -> None:
    before = Posterior(alpha, beta, 0)
    assert abs(before.at(versions, discount).mean - 0.5) <= abs(before.mean - 0.5) + 1e-9


def test_hard_is_low_but_not_hopeless() -> None:
    assert [is_hard(mean, SETTINGS) for mean in (0.04, 0.05, 0.39, 0.4)] == [False, True, True, False]


def test_an_episode_that_failed_by_the_agents_own_error_is_hard() -> None:
    assert failed_with_error("failed", "agent_timeout")
    assert failed_with_error("truncated", "tool_error")
    assert not failed_with_error("truncated", None)
    assert not failed_with_error("completed", "tool_error")


def test_only_rollouts_tell_how_hard_a_task_is() -> None:
    assert [counts_for(o) for o in Origin] == [True, False, False, False]
