"""Every rule of the contract finds its offender, and a sound trajectory passes all of them."""

import dataclasses
import math
import random
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flows.steps.chunk import Chunk
from flows.steps.decode import decode
from flows.steps.validate import RULES, takes_a_place, validate
from schemas.ids import shard_of
from schemas.settings import Family
from schemas.trajectory import Reward, Trajectory, Turn, WeightVersionSpan, to_batch
from tests.samples import message, trajectory

FAMILIES = (Family(name="add", num_tasks=10, held_out_ratio=0.2),)  # tasks 0 to 7 train, 8 and 9 are held out


def reasons(*trajectories: Trajectory, families: tuple[Family, ...] = FAMILIES, task: str = "add/7") -> list[str]:
    chunk = Chunk(shard_of(task), to_batch(trajectories), ())
    return [RULES[code - 1].reason if code else "" for code in validate(chunk, families).faults.tolist()]


def reason(**changes: Any) -> str:
    """The reason for a trajectory with `changes`; the sound one before and after it must stay sound."""
    first, found, last = reasons(trajectory(index=0), dataclasses.replace(trajectory(index=1), **changes), trajectory())
    assert (first, last) == ("", "")
    return found


def failed(error_kind: str = "environment", **changes: Any) -> dict[str, Any]:
    return {"status": "failed", "stop_reason": "error", "error_kind": error_kind, "reward": None, **changes}


def test_tasks_of_any_length_take_no_memory_once_they_are_judged() -> None:
    reasons(trajectory())
    tracemalloc.start()
    for number in range(20):
        assert "task_id is not" in reasons(trajectory(task_id=f"add/{number}" + "x" * 500_000))[0]
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000


def test_a_sound_trajectory_passes() -> None:
    assert reasons(trajectory()) == [""]


def test_an_infrastructure_failure_without_reward_and_without_action_passes() -> None:
    empty = {"action_mask": (False,) * 6, "num_generated_tokens": 0, "weight_version_spans": ()}
    assert reason(**failed()) == ""
    assert reason(**failed(**empty)) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trajectory_id": "x' OR 1=1 --"}, "trajectory_id"),
        ({"trajectory_id": ""}, "trajectory_id"),
        ({"group_id": "../../etc/passwd"}, "group_id"),
        ({"group_index": 4}, "group_index"),
        ({"group_index": -1}, "group_index"),
        ({"group_size": 1025}, "group_index"),
        ({"group_size": 0}, "group_index"),
        ({"origin": "dream"}, "origin"),
        ({"environment": "<script>"}, "environment"),
        ({"producer": "a\nb"}, "producer"),
        ({"parent_id": "no uuid"}, "parent_id"),
        ({"content_hash": "a b"}, "content_hash"),
        ({"status": "fine"}, "status"),
        ({"stop_reason": "bored"}, "stop_reason"),
        ({"error_kind": "cosmic"}, "error_kind"),
        ({"reward": None}, "reward is missing"),
        (failed("agent_timeout"), "reward is missing"),
        (failed(reward=0.0), "reward is set"),
        ({"reward": math.nan}, "NaN or infinite"),
        ({"reward": math.inf}, "NaN or infinite"),
        ({"accelerator_s": math.nan}, "accelerator_s"),
        ({"environment_s": -1.0}, "environment_s"),
        ({"attempt": 0}, "attempt"),
        ({"min_weight_version": 2}, "min_weight_version above"),
        ({"dispatch_weight_version": -1}, "negative"),
        ({"token_ids": (), "action_mask": (), "behavior_logprobs": ()}, "no tokens"),
        ({"token_ids": (1, 2, 3)}, "differ in length"),
        ({"action_mask": (True,) * 7}, "differ in length"),
        ({"behavior_logprobs": (-1.0,) * 5}, "differ in length"),
        ({"action_mask": (False,) * 6, "num_generated_tokens": 0}, "no action tokens"),
        ({"token_ids": (1, 2, -3, 4, 5, 6)}, "token id is negative"),
        ({"behavior_logprobs": (0.0, 0.0, 0.0, -1.0, math.nan, -1.0)}, "NaN or infinite"),
        ({"behavior_logprobs": (0.0, math.inf, 0.0, -1.0, -1.0, -1.0)}, "NaN or infinite"),
        ({"behavior_logprobs": (0.0, 0.0, 0.0, -1.0, 0.5, -1.0)}, "positive"),
        ({"num_generated_tokens": 4}, "num_generated_tokens"),
        ({"num_prompt_tokens": 7}, "num_prompt_tokens"),
        ({"weight_version_spans": (WeightVersionSpan(0, 7, 1),)}, "out of order or out of range"),
        ({"weight_version_spans": (WeightVersionSpan(-1, 6, 1),)}, "out of order or out of range"),
        ({"weight_version_spans": (WeightVersionSpan(0, 4, 1), WeightVersionSpan(3, 6, 1))}, "out of order"),
        ({"weight_version_spans": (WeightVersionSpan(0, 5, 1),)}, "uncovered"),
        ({"weight_version_spans": ()}, "uncovered"),
        ({"weight_version_spans": (WeightVersionSpan(0, 6, 2),)}, "differs from the spans"),
        ({"turns": (Turn(3, 6, 7),)}, "turns"),
        ({"turns": (Turn(4, 3, 6),)}, "turns"),
        ({"turns": (Turn(3, 6, 6, result_status="great"),)}, "turns"),
        ({"turns": (Turn(3, 6, 6, reward=math.nan),)}, "process reward"),
        ({"rewards": (Reward("format", math.inf),)}, "process reward"),
    ],
)
def test_each_rule_finds_its_offender_and_spares_its_neighbours(changes: dict[str, Any], words: str) -> None:
    assert words in reason(**changes)


def test_two_spans_give_the_oldest_and_the_newest_version() -> None:
    spans = (WeightVersionSpan(0, 4, 7), WeightVersionSpan(4, 6, 8))
    versions = {"dispatch_weight_version": 7, "weight_version_spans": spans}
    assert reason(min_weight_version=7, max_weight_version=8, **versions) == ""
    assert "differs" in reason(min_weight_version=8, max_weight_version=8, **versions)  # stamped late


def test_a_span_without_action_tokens_says_nothing_about_the_versions() -> None:
    spans = (WeightVersionSpan(0, 3, 6), WeightVersionSpan(3, 6, 7))  # the prompt was read by version 6
    assert reason(min_weight_version=7, max_weight_version=7, weight_version_spans=spans) == ""


def test_a_logprob_off_the_mask_may_be_anything_finite() -> None:
    assert reason(behavior_logprobs=(3.0, 0.0, 0.0, -1.0, -1.0, -1.0)) == ""


def test_rounding_of_a_certain_token_is_not_a_positive_logprob() -> None:
    assert reason(behavior_logprobs=(0.0, 0.0, 0.0, 1e-7, -1.0, -1.0)) == ""


@pytest.mark.parametrize(
    ("task", "family", "words"),
    [
        ("add", "add", "task_id is not"),
        ("add/", "add", "task_id is not"),
        ("add/x", "add", "task_id is not"),
        ("add/-1", "add", "task_id is not"),
        ("add/1234567890", "add", "task_id is not"),
        ("", "", "task_id is not"),
        ("add/7" + "x" * 1000, "add", "task_id is not"),
        ("a b/1", "a b", "task_id is not"),
        ("add/1", "sub", "task_id is not"),
        ("sub/1", "sub", "not in the settings"),
        ("add/10", "add", "not in the settings"),
        ("add/8", "add", "held-out"),
    ],
)
def test_tasks_are_checked_against_the_settings(task: str, family: str, words: str) -> None:
    changed = trajectory(task_id=task, task_family=family)
    assert words in reasons(changed, task=task)[0]


@pytest.mark.parametrize("origin", ["rollout", "eval", "counterfactual"])
def test_a_held_out_task_is_never_trained_on_whoever_sampled_it(origin: str) -> None:
    assert "held-out" in reasons(trajectory(task_id="add/8", origin=origin), task="add/8")[0]
    assert reasons(trajectory(task_id="add/7", origin=origin), task="add/7") == [""]


def test_without_families_in_the_settings_any_task_goes() -> None:
    assert reasons(trajectory(task_id="sub/123"), families=(), task="sub/123") == [""]


def test_a_task_of_another_shard_is_found_out() -> None:
    assert "shard" in reasons(trajectory(), task="add/6")[0]


def test_only_rules_of_identity_keep_a_trajectory_from_its_place() -> None:
    codes = {rule.reason: code for code, rule in enumerate(RULES, 1)}
    assert not takes_a_place(codes["group_id is not a UUID"])
    assert takes_a_place(codes["no tokens"])


def test_nulls_inside_lists_are_found() -> None:
    batch = to_batch([trajectory(index=0), trajectory(index=1)])
    index = batch.schema.get_field_index("token_ids")
    tokens = pa.array([[1, 2, 3, 4, 5, 6], [1, 2, None, 4, 5, 6]], pa.list_(pa.int32()))
    chunk = Chunk(shard_of("add/7"), batch.set_column(index, batch.schema.field(index), tokens), ())
    codes = validate(chunk, ()).faults
    assert [RULES[c - 1].reason if c else "" for c in codes] == ["", "a list holds nulls"]


def test_times_that_no_calendar_holds_are_found() -> None:
    batch = to_batch([trajectory()])
    index = batch.schema.get_field_index("started_at")
    times = pa.array([2**63 - 1], pa.timestamp("us", tz="UTC"))
    chunk = Chunk(shard_of("add/7"), batch.set_column(index, batch.schema.field(index), times), ())
    assert "started_at" in RULES[validate(chunk, ()).faults[0] - 1].reason


def test_verdicts_do_not_depend_on_the_company() -> None:
    rng = random.Random(7)
    pool = [
        trajectory(index=0),
        trajectory(index=1, reward=math.nan),
        trajectory(index=2, token_ids=(1, 2)),
        trajectory(index=3, weight_version_spans=()),
        trajectory(index=0, turns=(Turn(3, 6, 9),)),
        trajectory(index=1, turns=(Turn(3, 4, 5), Turn(5, 6, 6))),
    ]
    alone = {id(t): reasons(t)[0] for t in pool}
    for _ in range(50):
        company = rng.choices(pool, k=rng.randint(1, 12))
        assert reasons(*company) == [alone[id(t)] for t in company]


def test_a_slice_of_a_larger_batch_is_judged_by_its_own_rows() -> None:
    batch = to_batch([trajectory(index=0, token_ids=(1, 2)), trajectory(index=1), trajectory(index=2, reward=math.nan)])
    chunk = Chunk(shard_of("add/7"), batch.slice(1, 2), ())
    assert (validate(chunk, ()).faults > 0).tolist() == [False, True]


def test_a_chunk_without_rows_has_no_faults() -> None:
    assert validate(decode(0, [], {}), ()).faults.dtype == np.uint8
    assert len(validate(decode(shard_of("add/7"), [message([trajectory()], 0)], {}), ()).faults) == 1
