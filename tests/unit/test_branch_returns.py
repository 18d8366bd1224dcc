"""Parents wait for their branches on a real Delta lake, branches are evidence and no samples, and all of it resumes."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.lake import Lake
from infra.sql import connect
from schemas.ids import fork_id
from schemas.names import Event
from schemas.settings import Settings, load
from tests.experience import NOW, Sample, experience, leave, put
from tests.rows import row
from trainers.branches import Branches
from trainers.credit.evidence import BRANCH_MEANS
from trainers.stream import Batch, Cursor, ExperienceStream

TURNS = ((1, 2, 0.0), (2, 3, 0.0))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake(str(tmp_path / "lake"))
    made.ensure()
    return made


def settings_of(batch: int = 2, wait_s: float = 60) -> Settings:
    return load(
        overrides=[
            f"--loop.batch_size={batch}",
            "--loop.group_size=2",
            "--loop.max_staleness=3",
            "--credit.fork_budget=1",
            f"--credit.fork_wait_s={wait_s}",
        ]
    )


def pair(group: str, *forked: int) -> list[Sample]:
    """Two siblings, the first of which is forked at turns `forked`."""
    first = Sample(f"{group}-0", group=group, turns=TURNS, forked_turns=forked or None)
    return [first, replace(first, name=f"{group}-1", reward=0.0, forked_turns=None)]


def branches(parent: str, turn: int, mean: float, version: int = 1) -> list[Sample]:
    fork = fork_id(parent, turn)
    one = Sample("", version=version, group=fork, mean=mean, turns=TURNS[1:], origin="counterfactual")
    return [replace(one, name=f"{fork}-{i}") for i in range(2)]


def names(batch: Batch | None) -> list[str]:
    return [] if batch is None else sorted(batch.rows["trajectory_id"].to_pylist())


def means(batch: Batch | None) -> dict[str, list[float | None]]:
    assert batch is not None
    return dict(zip(batch.rows["trajectory_id"].to_pylist(), batch.rows[BRANCH_MEANS].to_pylist(), strict=True))


def polled(lake: Lake, settings: Settings, cursor: Cursor | None = None) -> ExperienceStream:
    stream = ExperienceStream(lake, settings, cursor)
    stream.poll(1)
    return stream


def test_a_forked_group_waits_for_its_branches_and_others_do_not(lake: Lake) -> None:
    put(lake, [*pair("a", 0, 1), *pair("b")], 1)
    stream = polled(lake, settings_of())
    assert stream.num_available == 4
    assert names(stream.take(1)) == ["b-0", "b-1"]
    assert stream.take(1) is None
    put(lake, branches("a-0", 0, 0.25), 2)
    stream.poll(1)
    assert stream.take(1) is None  # those of turn 1 are under way
    put(lake, branches("a-0", 1, 0.75), 3)
    stream.poll(1)
    assert means(stream.take(1)) == {"a-0": [0.25, 0.75], "a-1": [None, None]}
    assert stream.num_available == 0  # branches are not trained on


def test_a_group_whose_branches_do_not_come_goes_without_them() -> None:
    waiting = Branches(wait_s=10)
    assert waiting.sort(7, experience(pair("a", 0, 1)), now_s=100).num_rows == 0
    waiting.learn(experience(branches("a-0", 1, 0.5)))
    assert waiting.ready(now_s=109.9) == []
    [(version, rows)] = waiting.ready(now_s=110)
    assert (version, rows["trajectory_id"].to_pylist()) == (7, ["a-0", "a-1"])
    assert waiting.told(rows)[BRANCH_MEANS].to_pylist() == [[None, 0.5], [None, None]]
    assert waiting.waiting() == []


def test_late_members_of_a_group_that_waits_are_not_lost_where_other_parents_come_with_them(lake: Lake) -> None:
    put(lake, pair("a", 0), 1)
    stream = polled(lake, settings_of())
    late = [replace(pair("a")[1], name=name) for name in ("a-2", "a-3")]
    put(lake, [*late, *pair("c", 1)], 2)
    stream.poll(1)
    assert stream.num_available == 6
    assert names(stream.take(1)) == ["a-2", "a-3"]


def test_a_batch_without_branches_says_nothing_about_them(lake: Lake) -> None:
    put(lake, pair("b"), 1)
    batch = polled(lake, settings_of()).take(1)
    assert batch is not None
    assert BRANCH_MEANS not in batch.rows.column_names


def test_branches_are_no_samples_even_where_none_are_asked_for(lake: Lake) -> None:
    put(lake, [*pair("b"), *branches("gone", 0, 0.5)], 1)
    plain = load(overrides=["--loop.batch_size=2", "--loop.group_size=2", "--credit.process_weight=0"])
    stream = polled(lake, plain)
    assert stream.num_available == 2
    assert names(stream.take(1)) == ["b-0", "b-1"]


def test_a_resumed_learner_waits_on_and_knows_what_had_returned(lake: Lake) -> None:
    put(lake, [*pair("a", 0, 1), *pair("b", 0)], 1)
    put(lake, [*branches("a-0", 0, 0.25), *branches("b-0", 0, 0.5)], 2)
    before = polled(lake, settings_of())
    assert before.num_available == 4
    cursor = Cursor.model_validate_json(before.cursor().to_bytes())
    assert [name for name, _ in cursor.waiting] == ["a-0", "a-1"]
    after = polled(lake, settings_of(), cursor)
    assert means(after.take(1)) == {"b-0": [0.5, None], "b-1": [None, None]}
    assert after.take(1) is None
    put(lake, branches("a-0", 1, 0.75), 3)
    after.poll(1)
    assert means(after.take(1)) == {"a-0": [0.25, 0.75], "a-1": [None, None]}


def test_what_is_evicted_while_it_waits_is_not_trained_on(lake: Lake) -> None:
    put(lake, pair("a", 0), 1)
    stream = polled(lake, settings_of())
    leave(lake, ["a-0", "a-1"], Event.EVICTED, 1)
    stream.poll(1)
    put(lake, branches("a-0", 0, 0.25), 2)
    stream.poll(1)
    assert (stream.num_available, stream.dropped["evicted"]) == (0, 2)


def test_returns_are_forgotten_when_no_parent_of_theirs_can_be_trained_on() -> None:
    known = Branches(wait_s=10)
    known.learn(experience([*branches("a-0", 0, 0.25, version=1), *branches("a-0", 1, 0.5, version=2)]))
    known.forget(2)
    parent = experience(pair("a", 0, 1))
    assert known.told(parent)[BRANCH_MEANS].to_pylist() == [[None, 0.5], [None, None]]


def test_branches_are_no_part_of_what_is_produced_to_be_trained_on(lake: Lake) -> None:
    sampled = {"event": "admitted", "partition": 0, "topic": "trajectories", "at": NOW, "day": "2026-01-01"}
    names = [("a", "rollout", 10), ("b", "counterfactual", 2), ("c", "rollout", 20)]
    rows = [
        row("ledger", trajectory_id=name, task_id="t", origin=origin, num_generated_tokens=size, offset=size, **sampled)
        for name, origin, size in names
    ]
    lake.append("ledger", rows, "test", 1)
    assert polled(lake, settings_of()).lengths.take() == {"produced_length": 15.0}
    with connect(lake) as views:
        produced = views.sql("SELECT num_trajectories, mean_length FROM length_bias WHERE population = 'produced'")
        assert set(produced.fetchall()) == {(2, 15.0)}
        assert views.sql("SELECT task_id, num_trajectories FROM starved_tasks").fetchall() == [("t", 2)]
