"""Checkpoints: whole or not at all, and never a silent start from nothing."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from schemas.errors import SettingsError
from schemas.settings import Learner
from trainers.checkpoint import CURSOR, MANIFEST, CheckpointError, Checkpoints, Incarnation, State, check_stage
from trainers.stream import Cursor

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LIFE = Incarnation(name="a", resumed_from_step=0, started_at=NOW)


def store(root: Path, keep: int = 2, fence: int = 0) -> Checkpoints:
    return Checkpoints(root, keep, lambda: NOW, fence)


def write(checkpoints: Checkpoints, step: int, *, whole: bool = True) -> Path:
    folder = checkpoints.begin(step, step // 10)
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "shard.pt").write_bytes(b"weights" * step)
    (folder / "rng-00000.pt").write_bytes(b"random")
    if whole:
        state = State(step=step, weight_version=step // 10, incarnations=(LIFE,))
        checkpoints.complete(folder, state, Cursor(experience_version=step, live=(("t", step, 0),)))
    return folder


def test_a_checkpoint_without_its_manifest_is_passed_over_by_name(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    write(checkpoints, 20)
    torn = write(checkpoints, 40, whole=False)
    found, incomplete = checkpoints.newest()
    assert found is not None
    assert found.state == State(step=20, weight_version=2, incarnations=(LIFE,))
    assert found.cursor == Cursor(experience_version=20, live=(("t", 20, 0),))
    assert (found.folder / "rng-00000.pt").read_bytes() == b"random"
    assert incomplete == [torn.name]


@pytest.mark.parametrize("name", [CURSOR, "deepspeed/shard.pt", "rng-00000.pt"])
def test_a_file_that_was_cut_in_half_stops_the_resume_by_name(tmp_path: Path, name: str) -> None:
    checkpoints = store(tmp_path)
    path = write(checkpoints, 20) / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=name):
        checkpoints.newest()


def test_a_file_with_one_other_byte_stops_the_resume_by_name(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    path = write(checkpoints, 20) / CURSOR
    path.write_bytes(path.read_bytes().replace(b'"t"', b'"u"'))
    with pytest.raises(CheckpointError, match=CURSOR):
        checkpoints.newest()


def test_a_missing_file_or_a_damaged_manifest_stops_the_resume_by_name(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    folder = write(checkpoints, 20)
    (folder / "rng-00000.pt").unlink()
    with pytest.raises(CheckpointError, match=r"rng-00000\.pt is missing or a link"):
        checkpoints.newest()
    (folder / MANIFEST).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=MANIFEST):
        checkpoints.newest()


def test_no_checkpoint_at_all_is_a_new_run(tmp_path: Path) -> None:
    assert store(tmp_path / "none").newest() == (None, [])


def test_only_the_newest_complete_ones_stay(tmp_path: Path) -> None:
    checkpoints = store(tmp_path, keep=2)
    write(checkpoints, 10)
    write(checkpoints, 20, whole=False)
    write(checkpoints, 30)
    write(checkpoints, 40)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000030-v00000003", "step-00000040-v00000004"]


def test_what_a_crash_left_is_not_mixed_into_a_new_try(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    (write(checkpoints, 40, whole=False) / "left-over").write_bytes(b"old")
    folder = write(checkpoints, 40)
    assert not (folder / "left-over").exists()
    assert checkpoints.newest()[0] is not None


def test_steps_sort_by_number(tmp_path: Path) -> None:
    checkpoints = store(tmp_path, keep=5)
    for step in (90, 1000, 200):
        write(checkpoints, step)
    found, _ = checkpoints.newest()
    assert found is not None
    assert found.state.step == 1000


def test_what_an_earlier_learner_completes_after_a_take_over_does_not_count(tmp_path: Path) -> None:
    zombie, heir = store(tmp_path), store(tmp_path, fence=7)
    write(zombie, 20)
    torn = write(zombie, 40, whole=False)
    heir.take_over()
    zombie.complete(torn, State(step=40, weight_version=4, incarnations=(LIFE,)), Cursor())
    late = write(zombie, 60)
    for checkpoints in (heir, store(tmp_path, fence=7)):
        checkpoints.take_over()
        found, _ = checkpoints.newest()
        assert found is not None
        assert found.state.step == 20
    own = write(heir, 30)
    assert own.name == "step-00000030-v00000003-f00000007"
    assert not late.exists()  # older than the first of the heir, whatever its step
    third = store(tmp_path, fence=9)
    third.take_over()
    write(heir, 90)
    found, _ = third.newest()
    assert found is not None
    assert found.folder == own


def test_a_take_over_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    heir = store(tmp_path, fence=2)
    heir.take_over()
    write(store(tmp_path), 20)
    assert heir.newest() == (None, [])


@pytest.mark.parametrize(("before", "now"), [(0, 3), (2, 3), (3, 1)])
def test_a_checkpoint_is_refused_where_zero_3_has_come_or_gone(before: int, now: int) -> None:
    with pytest.raises(SettingsError, match=f"step-1 was saved under ZeRO {before}, the settings ask for {now}"):
        check_stage(before, Learner(zero_stage=now), "step-1")


def test_a_checkpoint_is_taken_up_by_the_stages_that_keep_weights_whole() -> None:
    for before, now in ((0, 2), (2, 1), (3, 3)):
        check_stage(before, Learner(zero_stage=now), "step-1")
