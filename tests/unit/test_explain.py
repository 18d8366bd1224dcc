"""`lagoon explain`: a trajectory as the lake tells it."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.cli.explain import WIDTH, explain
from infra.lake import Lake
from infra.sql import connect
from schemas.errors import LakeError
from schemas.ids import fork_id
from schemas.trajectory import Trajectory, Turn, to_batch
from tests.rows import row
from tests.samples import trajectory

TALK = (
    {"role": "user", "content": "75 + 65?"},
    {"role": "assistant", "content": "an example in the prompt"},
    {"role": "user", "content": "now yours"},
    {"role": "assistant", "content": "<call>75+65</call>"},
    {"role": "tool", "content": "140\x1b[31m"},
    {"role": "assistant", "content": "word " * 40},
)
TURNS = (Turn(1, 3, 4, "calculator", "75+65", "ok", 1.0, 0.25), Turn(4, 6, 6, reward=0.5))


def lake_of(tmp_path: Path, *admitted: Trajectory) -> Lake:
    lake = Lake(str(tmp_path))
    lake.ensure()
    rows = [
        row("experience", **cells, group_reward_mean=0.5, group_reward_std=0.5345, group_num_rewards=8)
        for cells in to_batch(admitted).to_pylist()
    ]
    lake.append("experience", rows, "test", 1)
    events = [row("ledger", trajectory_id=t.trajectory_id, event="admitted", at_version=4, min_weight_version=3)
              for t in admitted]  # fmt: skip
    events.append(row("ledger", trajectory_id="lost", event="stale", reason="3 behind", at_version=7))
    lake.append("ledger", events, "test", 1)
    return lake


def text_of(lake: Lake, name: str) -> list[str]:
    with connect(lake) as connection:
        return list(explain(connection, name))


def train(lake: Lake, name: str) -> None:
    step = row("train_steps", step=12, incarnation="life", weight_version=4)
    by_turn = {"turn_advantages": [0.75, 1.25], "turn_values": [0.5, -0.125], "turn_importance_ratios": [1.5, 0.5]}
    sample = row("train_samples", step=12, incarnation="life", trajectory_id=name, use=1, staleness=1, **by_turn)
    lake.append("train_steps", [step], "test", 1)
    lake.append("train_samples", [sample], "test", 1)


def test_each_turn_shows_what_was_said_what_came_back_and_what_was_learned(tmp_path: Path) -> None:
    one = replace(trajectory(version=3), messages=TALK, turns=TURNS)
    lake = lake_of(tmp_path, one)
    train(lake, one.trajectory_id)
    lines = text_of(lake, one.trajectory_id[:8])
    first = lines[lines.index("turn 1: tokens 1 to 2, version 3, 0.250 s") :]
    assert first[1:8] == [
        "  assistant   <call>75+65</call>",
        "  tool        140\N{REPLACEMENT CHARACTER}[31m",
        "  call        calculator 75+65",
        "  result      ok",
        "  reward      1.000 of its own",
        "  step 12     advantage 0.750, value 0.500, importance ratio 1.500",
        "",
    ]
    assert lines[-1] == "  step 12     advantage 1.250, value -0.125, importance ratio 0.500"
    assert max(map(len, lines)) <= WIDTH
    prompt = lines[lines.index("prompt") : lines.index("turn 1: tokens 1 to 2, version 3, 0.250 s")]
    assert "  assistant   an example in the prompt" in prompt


def test_a_trajectory_that_was_not_admitted_is_told_by_the_ledger(tmp_path: Path) -> None:
    lines = text_of(lake_of(tmp_path, trajectory()), "lost")
    assert any(line.startswith("  stale") and line.endswith("3 behind") for line in lines)
    assert "trained in no step" in lines


def test_ids_that_name_none_or_several_are_refused(tmp_path: Path) -> None:
    lake = lake_of(tmp_path, trajectory(index=0, trajectory_id="ab1"), trajectory(index=1, trajectory_id="ab2"))
    with pytest.raises(LakeError, match="no trajectory"):
        text_of(lake, "zz")
    with pytest.raises(LakeError, match="ab1 and ab2"):
        text_of(lake, "ab")


def test_samples_of_an_older_lake_have_nothing_by_turn(tmp_path: Path) -> None:
    one = replace(trajectory(), messages=TALK, turns=TURNS)
    lake = lake_of(tmp_path, one)
    sample = row("train_samples", step=3, incarnation="life", trajectory_id=one.trajectory_id)
    lake.append("train_samples", [sample], "test", 1)
    assert text_of(lake, one.trajectory_id)[-1] == "  step 3      nothing by turn was written down"


def test_a_forked_turn_shows_what_its_branches_came_to_and_what_was_learned_from_them(tmp_path: Path) -> None:
    one = replace(trajectory(), messages=TALK, turns=TURNS)
    lake = Lake(str(tmp_path))
    lake.ensure()
    lake.append("experience", [row("experience", **to_batch([one]).to_pylist()[0], forked_turns=[0, 1])], "test", 1)
    fork = fork_id(one.trajectory_id, 1)
    came = [("b1", "admitted", 1.0), ("b2", "stale", 0.0), ("b3", "no_signal", None), ("b1", "redelivered", 1.0)]
    events = [row("ledger", trajectory_id=t, group_id=fork, event=event, reward=reward) for t, event, reward in came]
    lake.append("ledger", events, "test", 1)
    by_turn = {"turn_advantages": [0.75, 0.5], "turn_branch_means": [None, 0.5]}
    sample = row("train_samples", step=12, incarnation="life", trajectory_id=one.trajectory_id, **by_turn)
    lake.append("train_samples", [sample], "test", 1)
    lines = text_of(lake, one.trajectory_id)
    assert "  branches    asked for; 0 came, none with a reward" in lines
    assert "  branches    mean 0.500 of 2: 1.000, 0.000" in lines
    told = [line for line in lines if line.startswith("  step 12     advantage")]
    assert told[-2:] == ["  step 12     advantage 0.750", "  step 12     advantage 0.500, against branches 0.500"]
