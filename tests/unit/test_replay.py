"""Limits of a replay, and the places that it may fill."""

import shutil
from pathlib import Path

import pytest

from infra.cli import letters
from infra.cli.main import main
from infra.replays import refuse_used
from infra.stack import ports
from infra.stack.bring_up import resolve
from schemas.errors import LakeError, SettingsError
from schemas.replay import Limit, Range
from schemas.settings import Settings, load

DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1200", Limit(offset=1200)),
        ("1970-01-02", Limit(time_ms=DAY_MS)),
        ("1970-01-02T01:00:00+01:00", Limit(time_ms=DAY_MS)),
        ("1970-01-02T00:00:00.5Z", Limit(time_ms=DAY_MS + 500)),
    ],
)
def test_digits_are_an_offset_and_anything_else_a_time(text: str, expected: Limit) -> None:
    assert Limit.of(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "noon", "12:00", "²"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="neither an offset"):
        Limit.of(text)


def test_a_range_begins_with_its_start_and_ends_before_its_end() -> None:
    by_offset = Range(Limit(offset=2), Limit(offset=4))
    assert [n for n in range(6) if by_offset.holds("trajectories", n, 0)] == [2, 3]
    by_time = Range(Limit(time_ms=20), Limit(time_ms=40))
    assert [n for n in range(6) if by_time.holds("trajectories", 0, 10 * n)] == [2, 3]
    assert Range().holds("trajectories", 0, 0)


def test_versions_before_the_start_are_read_and_those_after_a_time_are_not() -> None:
    by_time = Range(Limit(time_ms=20), Limit(time_ms=40))
    assert [n for n in range(6) if by_time.holds("weights", 0, 10 * n)] == [0, 1, 2, 3]
    assert Range(Limit(offset=2), Limit(offset=4)).holds("control", 99, 0)


def test_only_an_empty_place_is_taken(tmp_path: Path) -> None:
    refuse_used(str(tmp_path / "none"), {})
    assert not (tmp_path / "none").exists()
    refuse_used(str(tmp_path), {})
    (tmp_path / "part-0.parquet").write_bytes(b"x")
    with pytest.raises(LakeError, match=r"is not empty \(for example part-0\.parquet\)"):
        refuse_used(str(tmp_path), {})
    with pytest.raises(LakeError, match="is a file"):
        refuse_used(str(tmp_path / "part-0.parquet"), {})


@pytest.mark.parametrize(("what", "missing"), [("trajectories", "--into"), ("dead-letters", "--where")])
def test_each_replay_says_what_it_needs(what: str, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", what])
    assert ended.value.code == 2
    assert f"{what} need {missing}" in capsys.readouterr().err


def test_a_copied_data_folder_sends_its_letters_to_no_broker_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = resolve(load([], [f"--run.data_dir={tmp_path / 'a'}", "--run.name=r"]))
    first.save(first.run.folder / "settings.json")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    asked: list[Settings] = []
    monkeypatch.setattr(letters, "replay", lambda settings, *_: asked.append(settings) or 0)
    main(["replay", "dead-letters", "--where=true", f"--run.data_dir={tmp_path / 'b'}", "--run.name=r"])
    [brokers] = [settings.kafka.brokers for settings in asked]
    assert brokers == f"{ports.HOST}:{ports.remembered(tmp_path / 'b', 'kafka')}"
    assert brokers != first.kafka.brokers
