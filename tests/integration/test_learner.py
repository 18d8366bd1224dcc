"""The learner as a process, under real DeepSpeed, from a real lake: it learns, dies by kill -9, and goes on exactly."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from infra.kafka import Follower, ensure_topics
from infra.lake import Lake
from infra.sql import connect
from infra.stack import health
from infra.stack.ports import free_port
from infra.weights import WeightStore
from schemas.messages import BufferMessage, LearnerReport, WeightSummary
from schemas.settings import Kafka, Settings, load
from tests.experience import Sample, put
from tests.policies import write_policy
from trainers.checkpoint import MANIFEST
from trainers.policy import Scorer, load_policy

ROOT = Path(__file__).parents[2]
BATCH = 8
GOOD, BAD, PROMPT = 5, 6, 1
LIMIT_S = 240

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]


def prepare(tmp_path: Path, kafka: Kafka, steps: int) -> Settings:
    """A run with a starting policy and a lake that holds just enough rows for `steps` steps: GOOD earns 1, BAD 0."""
    ensure_topics(kafka)
    policy = write_policy(tmp_path / "start", hidden=32, layers=1, mlp=32)
    options = {
        "run.data_dir": str(tmp_path / "data"),
        "policy.path": str(policy),
        "loop.batch_size": BATCH,
        "loop.group_size": 2,
        "loop.max_staleness": 15,
        "learner.num_train_steps": steps,
        "learner.learning_rate": 3e-3,
        "learner.sync_interval_start": 3,
        "learner.sync_interval": 3,
        "learner.micro_batches": 2,
        "objective.kl": 0.01,
        "learner.watchdog_s": 2,
        "telemetry.usage_s": 0.5,
        "tracking.enabled": False,
    }
    overrides = [f"--{name}={json.dumps(value)}" for name, value in options.items()]
    settings = load(overrides=overrides).model_copy(update={"kafka": kafka})
    settings.save(tmp_path / "settings.json")
    Lake.of(settings).ensure()
    put_rows(settings, tmp_path, range(steps))
    return settings


def put_rows(settings: Settings, tmp_path: Path, steps: Iterable[int]) -> None:
    """Just enough rows for one more step for each of `steps`, which are counted from 0."""
    good, bad = preferences(tmp_path / "start")
    for number in steps:
        put(Lake.of(settings), [_sample(number * BATCH + i, good, bad) for i in range(BATCH)], number + 1)


def preferences(folder: Path) -> tuple[float, float]:
    """Logprobs that the policy in `folder` gives GOOD and BAD after PROMPT."""
    scorer = Scorer(load_policy(folder))
    with torch.no_grad():
        ids = torch.tensor([[PROMPT, GOOD], [PROMPT, BAD]])
        good, bad = scorer(ids, torch.ones(2, 1, dtype=torch.bool)).tolist()
    return good, bad


def _sample(number: int, good: float, bad: float) -> Sample:
    """GOOD or BAD after PROMPT, sampled by the starting policy, in a group of one of each; lengths vary behind it."""
    wins, tail = number % 2 == 0, number % 5
    token, logprob = (GOOD, good) if wins else (BAD, bad)
    return Sample(
        f"t{number:04d}",
        reward=float(wins),
        mean=0.5,
        std=float(np.std([0, 1], ddof=1)),
        group=f"g{number // 2}",
        token_ids=[PROMPT, token, *[9] * tail],
        action_mask=[False, True, *[False] * tail],
        behavior_logprobs=[0.0, logprob, *[0.0] * tail],
    )


def begin(
    tmp_path: Path, overrides: Sequence[str] = (), failpoints: str = "", launcher: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """A learner process; its log goes to `learner.log`."""
    command = [*(launcher or [sys.executable]), str(ROOT / "trainers" / "learn.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "LAGOON_FAILPOINTS": failpoints}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with open(tmp_path / "learner.log", "ab") as log:
        return subprocess.Popen(
            [*command, "--config", str(tmp_path / "settings.json"), *overrides],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            env=environment,
        )


def end(process: subprocess.Popen[bytes], tmp_path: Path, code: int = 0) -> None:
    """Wait for `process`, which is to end with `code`."""
    try:
        assert process.wait(LIMIT_S) == code, (tmp_path / "learner.log").read_text()[-4000:]
    finally:
        process.kill()


def steps_done(settings: Settings) -> int:
    """Rows of train_steps: as many as steps in the first life of a run."""
    return Lake.of(settings).table("train_steps").count()


def wait_for_step(settings: Settings, step: int, process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while steps_done(settings) < step:
        assert process.poll() is None, (tmp_path / "learner.log").read_text()[-4000:]
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.05)


def check_each_row_was_trained_once(settings: Settings, steps: int) -> None:
    lake = connect(Lake.of(settings))
    live = lake.sql("select step, trajectory_id, use from live_samples order by step, trajectory_id").fetchall()
    assert [use for _, _, use in live] == [1] * (steps * BATCH)
    assert sorted(name for _, name, _ in live) == [f"t{i:04d}" for i in range(steps * BATCH)]
    assert lake.sql("select step from live_steps order by step").fetchall() == [(i + 1,) for i in range(steps)]
    for name in ("train_steps", "train_samples"):
        key = "step, incarnation" + (", trajectory_id" if name == "train_samples" else "")
        assert lake.sql(f"select {key} from {name} group by all having count(*) > 1").fetchall() == []


def check_versions(settings: Settings) -> None:
    """Every version is in the store, comes from the step that its row says, and agrees with its probe."""
    store, lake = WeightStore.of(settings), connect(Lake.of(settings))
    versions = store.versions()
    assert versions == list(range(1, versions[-1] + 1))
    published = lake.sql(
        "select published_version, step from live_steps where published_version is not null order by 1"
    ).fetchall()
    assert published == [(v, store.manifest(v).train_step) for v in versions[1:]]
    probe = store.manifest(versions[-1]).probe
    assert probe is not None
    scorer = Scorer(load_policy(store.fetch(versions[-1], settings.run.folder / "fetched")))
    ids = torch.tensor([probe.token_ids])
    with torch.no_grad():
        logprobs = scorer(ids, torch.ones_like(ids[:, 1:], dtype=torch.bool))
    assert logprobs.tolist() == pytest.approx(list(probe.logprobs), abs=1e-5)


def check_adapters(settings: Settings) -> None:
    """The first version is full and all others are adapters of it, which give the learner's own file."""
    store = WeightStore.of(settings)
    manifests = [store.manifest(version) for version in store.versions()]
    assert [(m.kind, m.base) for m in manifests] == [("full", None), *[("adapters", 1)] * (len(manifests) - 1)]
    for made in manifests[-2:]:
        kept = settings.checkpoints / str(made.checkpoint) / "policy" / "model.safetensors"
        assert (store.fetch(made.version, settings.run.folder / "again") / kept.name).read_bytes() == kept.read_bytes()


def check_deltas(settings: Settings, kafka: Kafka) -> None:
    """All versions after the first are deltas, over a resume too, are told as such, and give the learner's own file."""
    store = WeightStore.of(settings)
    manifests = [store.manifest(version) for version in store.versions()]
    assert [m.kind for m in manifests] == ["full", *["delta"] * (len(manifests) - 1)]
    told = {m.version: m for m in Follower(kafka, "weights", WeightSummary, "test-deltas").poll()}
    assert {v: (m.kind, m.num_bytes) for v, m in told.items()} == {m.version: (m.kind, m.num_bytes) for m in manifests}
    kept = settings.checkpoints / str(manifests[-1].checkpoint) / "policy" / "model.safetensors"
    assert (store.fetch(len(manifests), settings.run.folder / "again") / kept.name).read_bytes() == kept.read_bytes()


def test_killed_at_any_point_it_goes_on_without_repeating_or_skipping(tmp_path: Path, kafka: Kafka) -> None:
    steps, ready = 15, 8
    settings, options = prepare(tmp_path, kafka, ready), [f"--learner.num_train_steps={steps}"]
    process = begin(tmp_path, options)
    wait_for_step(settings, 5, process, tmp_path)
    process.kill()
    process.wait(30)
    put_rows(settings, tmp_path, range(ready, steps))  # not before: the other lives need something to do
    end(begin(tmp_path, options, failpoints="learner.before_manifest=1"), tmp_path, -signal.SIGKILL)
    torn = max((settings.run.folder / "checkpoints").glob("step-*"))
    assert not (torn / MANIFEST).exists()
    end(begin(tmp_path, options, failpoints="learner.after_checkpoint=1"), tmp_path, -signal.SIGKILL)
    end(begin(tmp_path, options), tmp_path)

    assert torn.name in (tmp_path / "learner.log").read_text()
    check_each_row_was_trained_once(settings, steps)
    check_versions(settings)
    before, after = preferences(tmp_path / "start"), preferences(settings.run.folder / "fetched" / "v00000006")
    assert after[0] - after[1] > before[0] - before[1] + 0.5
    told = {m.version for m in Follower(kafka, "weights", WeightSummary, "test").poll()}
    assert told == set(WeightStore.of(settings).versions())
    incarnations = connect(Lake.of(settings)).sql("select count(distinct incarnation) from train_steps").fetchall()
    assert incarnations == [(4,)]


def test_a_value_head_learns_goes_on_after_a_kill_and_is_in_no_published_policy(tmp_path: Path, kafka: Kafka) -> None:
    settings = prepare(tmp_path, kafka, 6)
    options = ["--credit.baseline=value", "--credit.value_learning_rate=0.05"]
    end(begin(tmp_path, options, failpoints="learner.before_manifest=1"), tmp_path, -signal.SIGKILL)
    end(begin(tmp_path, [*options, "--learner.num_train_steps=3"]), tmp_path)
    end(begin(tmp_path, options), tmp_path)
    check_each_row_was_trained_once(settings, 6)
    lake = connect(Lake.of(settings))
    steps = lake.sql("select value_loss, explained_variance from live_steps order by step").fetchall()
    assert all(loss is not None and variance is not None for loss, variance in steps)
    by_turn = lake.sql(
        "select step, len(turn_advantages), turn_values[1], turn_importance_ratios[1] from live_samples order by step"
    ).fetchall()
    assert {count for _, count, _, _ in by_turn} == {1}
    # at first the head says 0; the second life of the head, from a checkpoint of step 3, goes on where it was
    assert [{value for step, _, value, _ in by_turn if step == i} == {0.0} for i in (1, 4, 6)] == [True, False, False]
    versions = WeightStore.of(settings).versions()
    fetched = WeightStore.of(settings).fetch(versions[-1], settings.run.folder / "fetched")
    assert not any("value" in name for name in load_file(fetched / "model.safetensors"))


def test_an_empty_buffer_turns_health_red_and_steps_go_on_once_rows_come(tmp_path: Path, kafka: Kafka) -> None:
    settings = prepare(tmp_path, kafka, 2)
    process = begin(tmp_path, ["--learner.num_train_steps=3"])
    try:
        deadline = time.monotonic() + LIMIT_S
        while "empty" not in (answer := _health(settings)).reason:
            assert process.poll() is None, (tmp_path / "learner.log").read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert not answer.ok
        assert "last row was admitted" in answer.reason
        put_rows(settings, tmp_path, [2])
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
    check_each_row_was_trained_once(settings, 3)
    reports = [m.root for m in Follower(kafka, "buffer", BufferMessage, "test").poll()]
    assert any(isinstance(r, LearnerReport) and r.num_consumed == 2 * BATCH and not r.num_available for r in reports)


def test_two_ranks_under_zero_2_go_on_from_a_checkpoint_of_one(tmp_path: Path, kafka: Kafka) -> None:
    settings = prepare(tmp_path, kafka, 8)
    small = "--learner.learning_rate=1e-7"  # a few bits of each weight change: deltas pay
    end(begin(tmp_path, ["--learner.num_train_steps=4", small]), tmp_path)
    port = str(free_port())  # its own default is one port for all
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", port]
    end(begin(tmp_path, ["--learner.zero_stage=2", small], launcher=launcher), tmp_path)
    check_each_row_was_trained_once(settings, 8)
    check_versions(settings)
    check_deltas(settings, kafka)


def test_a_learner_of_adapters_publishes_them_alone_and_goes_on_from_the_same_base(
    tmp_path: Path, kafka: Kafka
) -> None:
    settings, options = prepare(tmp_path, kafka, 6), ["--learner.lora_rank=1", "--learner.num_train_steps=9"]
    process = begin(tmp_path, options)
    wait_for_step(settings, 4, process, tmp_path)
    process.kill()
    process.wait(30)
    put_rows(settings, tmp_path, range(6, 9))
    end(begin(tmp_path, options), tmp_path)
    check_each_row_was_trained_once(settings, 9)
    check_versions(settings)
    check_adapters(settings)


def test_on_sigterm_it_saves_and_a_longer_run_goes_on(tmp_path: Path, kafka: Kafka) -> None:
    settings = prepare(tmp_path, kafka, 6)
    process = begin(
        tmp_path, ["--learner.sync_interval_start=50", "--learner.sync_interval=50", "--learner.num_train_steps=7"]
    )
    wait_for_step(settings, 6, process, tmp_path)
    process.send_signal(signal.SIGTERM)
    end(process, tmp_path)
    assert WeightStore.of(settings).versions() == [1]
    assert (settings.run.folder / "checkpoints" / "step-00000006-v00000001" / MANIFEST).exists()
    put_rows(settings, tmp_path, [6])
    end(begin(tmp_path, ["--learner.num_train_steps=7"]), tmp_path)
    check_each_row_was_trained_once(settings, 7)
    check_versions(settings)


def _health(settings: Settings) -> health.Health:
    """What the learner says of itself, if it is there yet."""
    files = list((settings.run.folder / "services").glob("learner-*.json"))
    return health.at(files[0]) if files else health.Health(False)


def test_one_that_wakes_up_after_a_take_over_saves_and_publishes_nothing(tmp_path: Path, kafka: Kafka) -> None:
    settings = prepare(tmp_path, kafka, steps=6)
    first = begin(tmp_path, failpoints="stop:learner.before_manifest=1")
    try:
        stat = Path(f"/proc/{first.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        (tmp_path / "learner.log").rename(tmp_path / "zombie.log")
        second = begin(tmp_path)
        wait_for_step(settings, 1, second, tmp_path)
        first.send_signal(signal.SIGCONT)
        end(second, tmp_path)
        assert first.wait(LIMIT_S) == 1
    finally:
        first.kill()
    assert "lost its lease" in (tmp_path / "zombie.log").read_text()
    check_each_row_was_trained_once(settings, 6)
    assert WeightStore.of(settings).versions() == [1, 2, 3]
    store = WeightStore.of(settings)
    assert {store.manifest(v).checkpoint for v in store.versions()} == {
        f"step-{step:08d}-v{version:08d}-f00000002" for step, version in ((0, 1), (3, 2), (6, 3))
    }


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
