"""The overlap of rollouts and training, by hand."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra.lake import Lake
from infra.summary import busy_overlap, probes, summarize
from schemas.settings import Settings
from tests.rows import AT
from tests.unit.test_views import fill


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


def test_a_proof_whose_line_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "cache" / "rollout-0").mkdir(parents=True)
    proof, cut = '{"version": 1, "exact": true, "difference": 0.5}\n', '{"version": 2, "ex'
    (tmp_path / "cache" / "rollout-0" / "proofs.jsonl").write_text(f"{proof}{cut}{proof}{proof}{cut}")
    assert probes(tmp_path) == {"loads": 2, "exact": 2, "largest_difference": 0.5}


@pytest.mark.parametrize(("mode", "staleness", "passed"), [("sync", 0, True), ("sync", 1, False), ("async", 0, False)])
def test_the_check_of_the_mode_asks_for_old_samples_or_for_none(
    tmp_path: Path, mode: str, staleness: int, passed: bool
) -> None:
    given = {"run": {"name": "r", "data_dir": str(tmp_path)}, "loop": {"mode": mode, "max_staleness": 0}}
    settings = Settings.model_validate(given | {"learner": {"sync_interval_start": 1, "sync_interval": 1}})
    lake = Lake.of(settings)
    lake.ensure()
    life = {"step": 1, "incarnation": "i", "incarnation_at": AT}
    fill(lake, "train_steps", life)
    fill(lake, "train_samples", {"step": 1, "incarnation": "i", "trajectory_id": "t", "staleness": staleness})
    check = summarize(settings, 1.0)["checks"][f"{mode}hrony"]
    assert check["passed"] is passed
