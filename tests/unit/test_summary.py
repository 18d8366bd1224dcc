"""The overlap of rollouts and training, by hand."""

from datetime import UTC, datetime, timedelta

from infra.summary import busy_overlap


def interval(phase: str, start: float, end: float, busy_s: float) -> dict:
    epoch = datetime(2026, 1, 1, tzinfo=UTC)
    times = {"started_at": epoch + timedelta(seconds=start), "ended_at": epoch + timedelta(seconds=end)}
    return {"phase": phase, "busy_s": busy_s, **times}


def test_two_loops_that_are_always_busy_overlap_wholly() -> None:
    assert busy_overlap([interval("rollout", 0, 4, 4), interval("train", 1, 3, 2)]) == 1


def test_loops_that_take_turns_do_not_overlap() -> None:
    assert busy_overlap([interval("rollout", 0, 2, 2), interval("train", 2, 4, 2)]) == 0


def test_a_bin_overlaps_by_the_lesser_of_both() -> None:
    # seconds 0-2: rollouts busy 0.25 a second, training 0.5 a second: half of training had rollouts beside it
    assert busy_overlap([interval("rollout", 0, 2, 0.5), interval("train", 0, 2, 1.0)]) == 0.5


def test_without_training_there_is_no_overlap() -> None:
    assert busy_overlap([interval("rollout", 0, 2, 1)]) == 0
