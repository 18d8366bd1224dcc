"""ExperienceStream on a real Delta lake: nothing lost, nothing twice, however often it is resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra import retries
from infra.lake import Lake
from schemas.errors import LakeError
from schemas.names import Event
from schemas.settings import Settings, load
from tests.experience import Sample, group, leave, put
from tests.rows import row
from trainers.batches import Split
from trainers.credit import Turns
from trainers.signals import share_of, signals
from trainers.stream import Batch, Cursor, ExperienceStream


def settings_of(batch: int, max_uses: int = 1, max_staleness: int = 3) -> Settings:
    return load(
        overrides=[
            f"--loop.batch_size={batch}",
            "--loop.group_size=1",
            f"--loop.max_staleness={max_staleness}",
            f"--learner.max_uses={max_uses}",
        ]
    )


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"))
    made.ensure()
    return made


def long(name: str, num_tokens: int, **more: Any) -> Sample:
    """A trajectory of one prompt token and action tokens."""
    mask, behavior = [False] + [True] * (num_tokens - 1), [0.0] + [-1.0] * (num_tokens - 1)
    return Sample(name, token_ids=[1] * num_tokens, action_mask=mask, behavior_logprobs=behavior, **more)


def ids(batch: Batch | None) -> list[str]:
    assert batch is not None
    return batch.rows["trajectory_id"].to_pylist()


def drain(stream: ExperienceStream, version: int = 1, limit: int = 10**6) -> list[str]:
    """Trajectories of up to `limit` batches, in order."""
    found: list[str] = []
    for _ in range(limit):
        stream.poll(version)
        if (batch := stream.take(version)) is None:
            break
        found += ids(batch)
    return found


def test_surplus_of_one_step_is_trained_in_the_next(lake: Lake) -> None:
    # ten groups of 4, a batch is 8 groups; then six new groups: 8, then the 2 left over and the 6 new
    stream = ExperienceStream(lake, settings_of(32))
    put(lake, [s for g in range(10) for s in group(f"a{g}", 4)], 1)
    stream.poll(1)
    first = ids(stream.take(1))
    assert stream.take(1) is None
    assert stream.num_available == 8
    put(lake, [s for g in range(6) for s in group(f"b{g}", 4)], 2)
    stream.poll(1)
    second = ids(stream.take(1))
    assert len({name.split("-")[0] for name in first + second}) == 16
    assert len(set(first + second)) == 64
    assert stream.num_available == 0


def test_killed_after_every_checkpoint_nothing_is_skipped_and_nothing_trained_twice(lake: Lake) -> None:
    # 12 trajectories are read, 8 trained, a checkpoint, then a kill; five times over
    settings, cursor, trained = settings_of(8), Cursor(), []
    for life in range(5):
        put(lake, [long(f"{life}/{i}", 3 + i % 3) for i in range(12 if life == 0 else 8)], life + 1)
        stream = ExperienceStream(lake, settings, Cursor.model_validate_json(cursor.to_bytes()))
        stream.poll(1)
        trained += ids(stream.take(1))
        cursor = stream.cursor()
        stream.poll(1)
        stream.take(1)  # after the checkpoint: undone by the kill
    rest = drain(ExperienceStream(lake, settings_of(4), cursor))
    assert sorted(trained + rest) == sorted(f"{life}/{i}" for life in range(5) for i in range(12 if life == 0 else 8))


def test_second_resume_goes_on_where_the_first_ended(lake: Lake) -> None:
    # 30 batches, resume, 10 more, resume: the third run starts at 40, in the order of one uninterrupted run
    settings = settings_of(2)
    for commit in range(5):
        put(lake, [Sample(f"{commit}/{i}", priority=i % 7 / 10) for i in range(20)], commit + 1)
    whole = drain(ExperienceStream(lake, settings))
    assert len(whole) == 100
    parts, cursor = [], None
    for count in (30, 10, 10):
        stream = ExperienceStream(lake, settings, cursor)
        parts.append(drain(stream, limit=count))
        cursor = Cursor.model_validate_json(stream.cursor().to_bytes())
        assert stream.num_consumed == sum(map(len, parts))
    assert parts[2] == whole[80:]
    assert [name for part in parts for name in part] == whole


def test_every_rank_count_trains_the_same_sequence(lake: Lake) -> None:
    put(lake, [Sample(f"t{i}", token_ids=[1] * (2 + i), action_mask=[False] + [True] * (1 + i),
                      behavior_logprobs=[0.0] * (2 + i)) for i in range(8)], 1)  # fmt: skip
    stream = ExperienceStream(lake, settings_of(8))
    stream.poll(1)
    batch = stream.take(1)
    assert batch is not None
    made = signals(batch.rows, batch.tokens, Turns.of(batch.rows, batch.tokens), settings_of(8))
    for size in (1, 2, 3):
        places = [
            int(place)
            for rank in range(size)
            for part in share_of(batch.tokens, made, Split(2), rank, size)
            for place in part.rows
        ]
        assert sorted(places) == list(range(8))


def test_max_uses_survives_a_resume(lake: Lake) -> None:
    settings = settings_of(2, max_uses=3)
    put(lake, [Sample("a"), Sample("b")], 1)
    stream = ExperienceStream(lake, settings)
    assert drain(stream, limit=2) == ["a", "b", "a", "b"]
    again = ExperienceStream(lake, settings, stream.cursor())
    batch = again.take(1)
    assert batch is not None
    assert batch.uses == (3, 3)
    assert drain(again) == []


@pytest.mark.parametrize("event", [Event.EVICTED, Event.EXPIRED])
def test_what_the_ledger_says_has_left_is_not_trained_on(lake: Lake, event: Event) -> None:
    put(lake, [Sample("a"), Sample("b"), Sample("c")], 1)
    leave(lake, ["b"], event, 1)
    assert drain(ExperienceStream(lake, settings_of(2))) == ["a", "c"]


def test_a_ledger_ahead_of_the_experience_is_remembered_over_a_resume(lake: Lake) -> None:
    settings = settings_of(1)
    stream = ExperienceStream(lake, settings)
    leave(lake, ["late"], Event.EVICTED, 1)
    stream.poll(1)
    again = ExperienceStream(lake, settings, stream.cursor())
    put(lake, [Sample("late"), Sample("good")], 1)
    assert drain(again) == ["good"]
    assert again.cursor().gone == {}


def test_admission_is_no_leaving(lake: Lake) -> None:
    put(lake, [Sample("a")], 1)
    leave(lake, ["a"], Event.ADMITTED, 1)
    leave(lake, ["a"], Event.REDELIVERED, 2)
    assert drain(ExperienceStream(lake, settings_of(1))) == ["a"]


def test_a_learner_that_was_away_opens_no_file_that_is_too_old_for_it(lake: Lake) -> None:
    # at version 9 with a bound of 3, buckets below 6 are too old; their files could be gone for all it cares
    for version in (1, 5, 6, 9):
        put(lake, [Sample(f"v{version}-{i}", version, group=f"g{version}") for i in range(2)], version)
    for bucket in (1, 5):
        [file] = Path(lake.table_uri("experience")).glob(f"version_bucket={bucket}/*.parquet")
        file.unlink()
    stream = ExperienceStream(lake, settings_of(2, max_staleness=3))
    assert drain(stream, version=9) == ["v9-0", "v9-1", "v6-0", "v6-1"]
    assert stream.dropped["stale"] == 4
    assert stream.delta_version == lake.version("experience")


def test_a_bucket_that_is_too_old_in_part_is_read(lake: Lake) -> None:
    # width 4: bucket 1 holds versions 4 to 7, and at version 9 with a bound of 3 version 6 may still be used
    put(lake, [replace(Sample("v6", 6), bucket=1)], 1)
    options = load(overrides=["--loop.batch_size=1", "--loop.group_size=1", "--loop.bucket_width=4"])
    assert drain(ExperienceStream(lake, options), version=9) == ["v6"]


def test_a_run_that_ended_at_a_full_batch_goes_on_when_it_is_made_longer(lake: Lake) -> None:
    # 60 of 120 are done and everything that was there is used: 60 more
    settings = settings_of(2)
    put(lake, [Sample(f"a{i:02d}") for i in range(120)], 1)
    first = ExperienceStream(lake, settings)
    done = drain(first)
    assert (len(done), first.num_available) == (120, 0)
    put(lake, [Sample(f"b{i:02d}") for i in range(120)], 2)
    second = ExperienceStream(lake, settings, Cursor.model_validate_json(first.cursor().to_bytes()))
    more = drain(second)
    assert (len(more), len(set(done + more)), second.num_consumed) == (120, 240, 240)


def test_the_cursor_knows_the_place_in_the_log_that_the_ledger_has_reached(lake: Lake) -> None:
    stream = ExperienceStream(lake, settings_of(1))
    places = [("trajectories", 0, 4), ("trajectories", 0, 9), ("trajectories", 1, 2), ("trajectories@1", 0, 0)]
    rows = [row("ledger", topic=t, partition=p, offset=o) for t, p, o in places]
    lake.append("ledger", rows, "curate/test", 1)
    stream.poll(1)
    cursor = Cursor.model_validate_json(stream.cursor().to_bytes())
    assert cursor.offsets == {"trajectories/0": 10, "trajectories/1": 3, "trajectories@1/0": 1}
    assert ExperienceStream(lake, settings_of(1), cursor).cursor().offsets == cursor.offsets


def test_nothing_staler_than_the_bound_is_trained_on_at_use(lake: Lake) -> None:
    put(lake, [Sample(f"v{version}", version, group=f"g{version}") for version in (1, 2, 5)], 1)
    stream = ExperienceStream(lake, settings_of(1, max_staleness=3))
    assert drain(stream, version=5) == ["v5", "v2"]
    assert stream.dropped["stale"] == 1


def test_a_minimum_version_of_a_directive_bars_older_rows(lake: Lake) -> None:
    put(lake, [Sample("v4", 4), Sample("v5", 5)], 1)
    stream = ExperienceStream(lake, settings_of(1))
    stream.poll(5)
    assert ids(stream.take(5, min_version=5)) == ["v5"]
    assert stream.take(5, min_version=5) is None


def test_rows_longer_than_the_policy_has_positions_are_dropped_counted_and_named(lake: Lake) -> None:
    stream = ExperienceStream(lake, settings_of(1), max_positions=4)
    long = Sample("long", token_ids=[1] * 5, action_mask=[True] * 5, behavior_logprobs=[-1.0] * 5)
    fits = Sample("fits", token_ids=[1] * 4, action_mask=[True] * 4, behavior_logprobs=[-1.0] * 4)
    put(lake, [long, fits], 1)
    put(lake, [Sample("short")], 2)
    stream.poll(1)
    assert (stream.num_available, stream.dropped["too_long"], stream.too_long) == (2, 1, ("long",))
    assert sorted(drain(ExperienceStream(lake, settings_of(1), stream.cursor(), max_positions=4))) == ["fits", "short"]


def test_rows_without_a_reward_are_dropped_and_counted(lake: Lake) -> None:
    put(lake, [Sample("a", reward=None), Sample("b", mean=None, std=None), Sample("c")], 1)
    stream = ExperienceStream(lake, settings_of(1))
    assert drain(stream) == ["c"]
    assert stream.dropped["unscored"] == 2


def test_a_batch_names_the_delta_versions_it_was_read_at(lake: Lake) -> None:
    put(lake, [Sample("a")], 1)
    put(lake, [Sample("b")], 2)
    stream = ExperienceStream(lake, settings_of(2))
    stream.poll(1)
    batch = stream.take(1)
    assert batch is not None
    assert batch.delta_version == lake.version("experience")
    assert batch.delta_versions == (batch.delta_version - 1, batch.delta_version)


def test_live_rows_are_found_again_after_compaction(lake: Lake) -> None:
    for sequence in range(1, 4):
        put(lake, [Sample(f"{sequence}/{i}") for i in range(2)], sequence)
    stream = ExperienceStream(lake, settings_of(1))
    first = drain(stream, limit=1)
    lake.version("experience")  # refreshes the handle
    assert lake.table("experience").optimize.compact()["numFilesRemoved"] == 3
    again = ExperienceStream(lake, settings_of(1), stream.cursor())
    assert first + drain(again) == ["1/0", "1/1", "2/0", "2/1", "3/0", "3/1"]


def test_live_rows_that_are_gone_from_the_lake_stop_the_resume_by_name(lake: Lake) -> None:
    put(lake, [Sample("kept"), Sample("gone")], 1)
    stream = ExperienceStream(lake, settings_of(1))
    stream.poll(1)
    lake.version("experience")  # refreshes the handle
    lake.table("experience").delete("trajectory_id = 'gone'")
    with pytest.raises(LakeError, match="gone"):
        ExperienceStream(lake, settings_of(1), stream.cursor())


def test_a_file_of_live_rows_that_cannot_be_read_is_an_error_of_the_lake(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(lake, [Sample("a")], 1)
    stream = ExperienceStream(lake, settings_of(1))
    stream.poll(1)
    [file] = Path(lake.table_uri("experience")).glob("version_bucket=1/*.parquet")
    aside = file.rename(file.with_suffix(".aside"))
    monkeypatch.setattr(retries, "ATTEMPTS", 2)
    with pytest.raises(LakeError, match=r"experience: reading what was live failed 2 times"):
        ExperienceStream(lake, settings_of(1), stream.cursor())
    aside.rename(file)
    assert drain(ExperienceStream(lake, settings_of(1), stream.cursor())) == ["a"]


@settings(max_examples=8)
@given(data=st.data())
def test_any_schedule_of_reads_kills_and_resumes_trains_each_row_once(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lake = Lake(str(tmp_path_factory.mktemp("lake")))
    lake.ensure()
    options, cursor, trained, put_rows = settings_of(3), Cursor(), [], 0
    stream = ExperienceStream(lake, options)
    undone: list[str] = []
    for sequence in range(1, data.draw(st.integers(3, 10)) + 1):
        action = data.draw(st.sampled_from(["put", "train", "checkpoint", "kill"]))
        if action == "put":
            put(lake, [Sample(f"{put_rows + i}") for i in range(4)], sequence)
            put_rows += 4
        elif action == "train":
            undone += drain(stream, limit=1)
        elif action == "checkpoint":
            trained, undone, cursor = trained + undone, [], stream.cursor()
        else:
            stream, undone = ExperienceStream(lake, options, cursor), []
    done = trained + undone + drain(stream)
    assert len(done) == len(set(done)) == put_rows - put_rows % 3
