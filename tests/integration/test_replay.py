"""`lagoon replay` on a real broker: the log once more is the lake once more."""

from pathlib import Path

import pytest

from flows import curate
from infra import sql
from infra.cli.main import main
from infra.kafka import ensure_topics
from infra.lake import Lake
from schemas import wire
from schemas.settings import Kafka, Settings
from tests.integration.test_curate_kafka import Rollout, everything_happens, run_to_the_end, settings_for, table
from tests.samples import group

pytestmark = pytest.mark.kafka


@pytest.fixture
def settings(kafka: Kafka, tmp_path: Path) -> Settings:
    found = settings_for(kafka, tmp_path / "one")
    found.save(tmp_path / "settings.json")
    ensure_topics(kafka, 30)
    Lake.of(found).ensure()
    return found


def replay(tmp_path: Path, *arguments: str) -> int:
    return main(["replay", *arguments, "--config", str(tmp_path / "settings.json")])


def test_a_replay_of_the_whole_log_is_the_same_lake_and_touches_nothing_else(
    settings: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    everything_happens(Rollout(settings.kafka))
    run_to_the_end(settings)
    before = {name: Lake.of(settings).version(name) for name in curate.TABLES}
    assert replay(tmp_path, "trajectories", "--into", str(tmp_path / "two")) == 0
    for name in curate.TABLES:
        rows = table(Lake.of(settings), name)
        assert rows
        assert table(Lake(str(tmp_path / "two")), name) == rows
    assert {name: Lake.of(settings).version(name) for name in curate.TABLES} == before
    assert "10 of 10 messages read" in capfd.readouterr().out


def test_a_range_holds_its_messages_only(settings: Settings, tmp_path: Path) -> None:
    rollout = Rollout(settings.kafka)
    rollout.publish(1)
    for name in range(4):  # all of one task, and so in one partition: offsets 0 to 3
        rollout.send(group(name, [0.0, 1.0, 1.0, 0.0]))
    assert replay(tmp_path, "trajectories", "--from=1", "--to=3", "--into", str(tmp_path / "two")) == 0
    assert {row["offset"] for row in table(Lake(str(tmp_path / "two")), "ledger")} == {1, 2}
    early = ["trajectories", "--to=2020-01-01", "--into", str(tmp_path / "three")]
    assert replay(tmp_path, *early) == 2


def test_a_lake_that_holds_something_is_refused(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(tmp_path, "trajectories", "--into", settings.lake_uri) == 2
    assert "is not empty" in capsys.readouterr().err
    assert replay(tmp_path, "trajectories", "--from=noon", "--into", str(tmp_path / "two")) == 2
    assert "neither an offset (1200) nor a time" in capsys.readouterr().err


def books(lake: Lake) -> tuple[int, ...]:
    query = "SELECT admitted, dead_lettered, in_flight, balanced FROM conservation WHERE kind = 'trajectories'"
    with sql.connect(lake) as connection:
        return connection.sql(query).fetchall()[0]


def test_letters_that_a_newer_reader_can_read_are_replayed_and_counted_once(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout, lake = Rollout(settings.kafka), Lake.of(settings)
    rollout.publish(1)
    rollout.send(group("newer", [0.0, 1.0, 1.0, 0.0]))
    rollout.send(group("noise", [0.0, 1.0, 1.0, 0.0]), body=b"not Arrow")
    rollout.produced(lake)
    with monkeypatch.context() as older:
        older.setattr(wire, "SCHEMA_VERSION", 0)
        wire._schema.cache_clear()
        run_to_the_end(settings)
    assert books(lake) == (0, 8, 0, True)

    version = ["dead-letters", "--where", "error like '%schema version%'"]
    assert replay(tmp_path, *version, "--dry-run") == 0
    assert "1 letters would be sent" in capsys.readouterr().out
    assert replay(tmp_path, *version) == 0
    assert replay(tmp_path, *version) == 0  # before curate has read it: sent twice, counted once
    run_to_the_end(settings)
    assert books(lake) == (4, 4, 0, True)
    assert replay(tmp_path, *version) == 2
    assert "no dead letter" in capsys.readouterr().err

    for _ in range(2):  # noise stays noise, however often it comes
        assert replay(tmp_path, "dead-letters", "--where", "true") == 0
        run_to_the_end(settings)
        assert books(lake) == (4, 4, 0, True)


def test_a_condition_that_is_no_sql_is_refused(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(tmp_path, "dead-letters", "--where", "colour = 1") == 2
    assert "the condition cannot be answered" in capsys.readouterr().err
