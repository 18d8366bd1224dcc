"""A run that a command follows: when it is stuck, and when only slow."""

from collections import Counter

from infra.cli.course import NO_STEP_LIMIT_S, STUCK_S, Progress
from infra.watch import LoopState
from schemas.messages import EvalResult


def test_a_loop_in_which_any_service_gets_on_is_slow_not_stuck() -> None:
    """One service gets on every 100 s, each time another one; no train step is made in 1,500 s."""
    progress, state = Progress(0), LoopState()
    for number in range(15):
        now = 100.0 * (number + 1)
        match number % 4:
            case 0:
                state.tokens += 1
            case 1:
                state.outcomes = Counter(admitted=number)
            case 2:
                state.weight_version += 1
            case _:
                state.evals.append(EvalResult.model_construct())
        assert progress.fault(now, STUCK_S) == ""
        progress.note(state, now)


def test_a_stuck_loop_names_who_made_no_progress_for_how_long() -> None:
    progress = Progress(0)
    progress.note(LoopState(episodes=8, tokens=800), 30)
    progress.note(LoopState(episodes=8, tokens=800, train_step=1), 50)
    assert progress.fault(170, STUCK_S) == ""
    assert (
        progress.fault(171, STUCK_S)
        == "no progress: evaluator for 171 s, curate for 171 s, rollout for 141 s, learner for 121 s"
    )


def test_rollouts_that_go_on_do_not_hide_for_ever_that_nothing_is_learned() -> None:
    progress, now = Progress(0), 0.0
    while not (fault := progress.fault(now, STUCK_S)):
        assert now <= NO_STEP_LIMIT_S
        now += 100
        progress.note(LoopState(tokens=int(now)), now)
    assert fault == "no progress: learner for 1900 s, evaluator for 1900 s, curate for 1900 s"
