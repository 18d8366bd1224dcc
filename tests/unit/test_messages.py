"""JSON messages round trip; anything else is refused with the fields at fault."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import ids
from schemas.errors import ContractError
from schemas.messages import (
    Branch,
    BufferReport,
    Directive,
    EvalResult,
    File,
    Fork,
    LearnerReport,
    Manifest,
    Task,
    UsageInterval,
    WeightSummary,
    decode,
)
from schemas.names import NUM_SHARDS

MESSAGES = (Task, BufferReport, Fork, LearnerReport, WeightSummary, EvalResult, Directive, UsageInterval, Manifest)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("type_", MESSAGES)
@given(data=st.data())
def test_messages_survive_their_bytes(type_: type, data: st.DataObject) -> None:
    message = data.draw(_valid(type_))
    assert decode(type_, message.to_bytes()) == message


def _valid(type_: type) -> st.SearchStrategy:
    names = st.text("abcXYZ019_-/.", min_size=1, max_size=9)
    counts = st.integers(0, 2**53)
    time = st.datetimes(datetime(1970, 1, 1), datetime(2199, 12, 31), timezones=st.just(UTC))  # noqa: DTZ001
    by_name = {
        Task: dict(group_id=names, group_size=st.integers(1, 64), task_id=names, family=names, index=counts,
                   environment=names, seed=counts, draw=counts, dispatched_at=time, lease_until=time),
        BufferReport: dict(shard=names, at=time, learner_version=counts, num_pending=counts,
                           trajectories=st.dictionaries(names, counts), tokens=st.dictionaries(names, counts),
                           live=st.dictionaries(counts, counts)),
        Fork: dict(group_id=names, num_branches=st.integers(1, 64), task_id=names, family=names, index=counts,
                   branch=st.builds(Branch, parent_id=names, group_id=names, group_index=counts,
                                    attempt=st.integers(1, 9), token_ids=st.lists(counts, min_size=6),
                                    actions=st.sampled_from([(), ((1, 2),), ((1, 3), (4, 6))]))),
        LearnerReport: dict(at=time, weight_version=counts, train_step=counts, num_available=counts,
                            num_consumed=counts, needs_per_step=counts),
        WeightSummary: dict(version=counts, fingerprint=names, num_bytes=counts, train_step=counts, created_at=time),
        EvalResult: dict(eval_id=names, kind=st.sampled_from(["light", "full", "skipped"]), requested_version=counts,
                         start_version=counts, end_version=counts, score=st.none() | st.floats(0, 1),
                         num_scored=counts, num_unscored=counts, started_at=time, finished_at=time),
        Directive: dict(directive_id=names, target=st.sampled_from(["all", "learner", "clock"]), issued_by=names,
                        issued_at=time, pause=st.none() | st.booleans(),
                        family_weights=st.none() | st.dictionaries(names, st.floats(0, 1000))),
        UsageInterval: dict(interval_id=names, service=names, instance=names, phase=names, started_at=time,
                            ended_at=time, busy_s=st.floats(0, 1e6), idle_s=st.floats(0, 1e6)),
        Manifest: dict(version=counts, files=st.just((File(name="model.safetensors", num_bytes=1, sha256="0" * 64),)),
                       fingerprint=st.text("0123456789abcdef", min_size=64, max_size=64), created_at=time),
    }  # fmt: skip
    return st.builds(type_, **by_name[type_])


@given(st.sampled_from(MESSAGES), st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(type_: type, body: bytes) -> None:
    with pytest.raises(ContractError, match=type_.__name__):
        decode(type_, body)


def test_unknown_keys_and_infinities_are_refused_by_field() -> None:
    good = json.loads(Directive(directive_id="d", target="all", issued_by="x", issued_at=NOW).to_bytes())
    with pytest.raises(ContractError, match="surprise"):
        decode(Directive, json.dumps(good | {"surprise": 1}).encode())
    with pytest.raises(ContractError, match="learning_rate_scale"):
        decode(Directive, json.dumps(good | {"learning_rate_scale": 1e999}).encode())


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-01-01T00:00:00"])
def test_a_time_that_no_table_can_hold_in_utc_or_without_a_zone_is_refused(time: str) -> None:
    body = json.loads(Directive(directive_id="d", target="all", issued_by="x", issued_at=NOW).to_bytes())
    with pytest.raises(ContractError, match="issued_at"):
        decode(Directive, json.dumps(body | {"issued_at": time}).encode())


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/b", ".hidden", "", "a\x00b", "x" * 200])
def test_a_manifest_names_files_inside_its_folder_only(name: str) -> None:
    body = {"version": 1, "files": [{"name": name, "num_bytes": 1, "sha256": "0" * 64}], "fingerprint": "0" * 64,
            "created_at": "2026-01-01T00:00:00Z"}  # fmt: skip
    with pytest.raises(ContractError, match="files"):
        decode(Manifest, json.dumps(body).encode())


def test_a_task_issued_twice_has_one_group_id_and_another_draw_has_another() -> None:
    assert ids.group_id("run", "add/1", 7) == ids.group_id("run", "add/1", 7)
    assert ids.group_id("run", "add/1", 7) != ids.group_id("run", "add/1", 8)
    assert ids.group_id("run", "add/1", 7) != ids.group_id("run2", "add/1", 7)


@given(st.text(max_size=30), st.sampled_from([1, 2, 4, 8, 16]))
def test_each_shard_is_fed_by_one_partition(task: str, num_partitions: int) -> None:
    shard = ids.shard_of(task)
    assert 0 <= shard < NUM_SHARDS
    assert ids.partition_of(task, num_partitions) == shard % num_partitions


def test_trajectory_ids_are_uuid7_and_sort_by_time() -> None:
    made = [ids.trajectory_id() for _ in range(100)]
    assert len(set(made)) == 100
    assert all(i[14] == "7" and i[19] in "89ab" for i in made)
    assert [i[:13] for i in made] == sorted(i[:13] for i in made)
