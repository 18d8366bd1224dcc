"""A run copied to another machine, without its Kafka log, flow state, outboxes and MLflow: `lagoon resume` goes on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from infra import sql
from infra.lake import Lake
from infra.run_manifests import RunManifests
from infra.stack.bring_up import take_down
from infra.stack.programs import ROOT
from infra.stack.supervise import Supervisor, marked
from infra.weights import WeightStore
from schemas.settings import Settings, load

LIMIT_S = 400
SCORED = "evals where kind <> 'skipped'"
CARRIED = ("lake", "weights", "checkpoints", "settings.json")
PROFILE = ROOT / "infra" / "profiles" / "demo.toml"
SMALL = (
    "--evaluator.samples_per_family=4",
    "--learner.sync_interval_start=2",
    "--learner.sync_interval=2",
    "--loop.batch_size=64",
    "--dispatch.lease_s=10",
    "--curate.group_timeout_s=5",
    "--stack.start_timeout_s=400",
)


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_copied_run_goes_on_without_its_log_and_the_books_name_what_was_lost(
    tmp_path: Path, demo_policy: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    try:
        settings = _begin(old, Path(shutil.copytree(demo_policy, old / "policy")))
        _wait(lambda: Lake.of(settings).table("train_steps").count() >= 7, "step 7")
        _wait_for_scores(settings, 1)
        _kill_all(old)
        before = _look(settings)
        _copy(settings, new)
        shutil.rmtree(old)
        steps = before["step"] + 8
        settings = _resume(new, f"--learner.num_train_steps={steps}")
        _wait(lambda: _state(new, "learner").is_finished, "the learner's end")
        _wait_for_scores(settings, before["scored"] + 1)
        _drain(settings)
        _check(settings, before, steps)
    finally:
        for folder in (old, new):
            if folder.exists():
                take_down(str(folder), print)


def _begin(data_dir: Path, policy: Path) -> Settings:
    _lagoon(
        "up",
        f"--config={PROFILE}",
        f"--run.data_dir={data_dir}",
        "--run.name=moved",
        f"--policy.path={policy}",
        "--learner.num_train_steps=500",
        *SMALL,
    )
    return load([data_dir / "runs" / "moved" / "settings.json"])


def _resume(data_dir: Path, *overrides: str) -> Settings:
    _lagoon("resume", "moved", f"--run.data_dir={data_dir}", *overrides)
    return load([data_dir / "runs" / "moved" / "settings.json"])


def _lagoon(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infra.cli.main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def _kill_all(data_dir: Path) -> None:
    """The machine is gone: everything by kill -9, the supervisor first, and what was just being started."""
    supervisor = int((data_dir / "stack" / "supervisord.pid").read_text())

    def is_gone() -> bool:
        pids = [pid for pid in (supervisor, *marked(str(data_dir))) if Path(f"/proc/{pid}/exe").exists()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    _wait(is_gone, "end of the processes")


def _copy(settings: Settings, data_dir: Path) -> None:
    target = data_dir / "runs" / settings.run.name
    target.mkdir(parents=True)
    for name in CARRIED:
        source = settings.run.folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target / name)


def _look(settings: Settings) -> dict[str, Any]:
    """What the lake, the weight store and the manifests say of the life that has ended."""
    manifest = next(RunManifests(Lake.of(settings)).newest_first([]))
    return {
        "manifest": manifest,
        "step": _last_checkpoint(settings),  # the manifest's, or one that a kill left without its manifest
        "in_flight": _value(settings, "select in_flight from conservation where kind = 'trajectories'"),
        "outcomes": _value(settings, "select count(*) from outcomes"),
        "scored": _value(settings, f"select count(*) from {SCORED}"),
        "draws": _value(settings, "select count(*) from dispatches where event = 'opened'"),
    }


def _last_checkpoint(settings: Settings) -> int:
    """The step of the newest complete checkpoint, from its name."""
    return max(int(path.parent.name.split("-")[1]) for path in settings.checkpoints.glob("step-*/MANIFEST.json"))


def _wait_for_scores(settings: Settings, count: int) -> None:
    with closing(sql.Live(Lake.of(settings))) as lake:
        _wait(lambda: lake.ask(f"select count(*) >= {count} from {SCORED}") == [(True,)], f"{count} evaluations")


def _drain(settings: Settings) -> None:
    """Stop opening groups, hand over, and wait until everything is in the lake."""
    supervisor = Supervisor(settings.run.data_dir)
    supervisor.stop(["dispatch"], timeout_s=LIMIT_S)
    supervisor.stop(["rollout-0"], timeout_s=LIMIT_S)
    settled = "select sum(abs(in_flight)) from conservation"
    with closing(sql.Live(Lake.of(settings))) as lake:
        _wait(lambda: lake.ask(settled) == [(0,)], "the last trajectories to reach the lake")


def _check(settings: Settings, before: dict[str, Any], steps: int) -> None:
    manifest = before["manifest"]
    assert settings.run.life == 1
    # steps are consecutive, and go on from the last checkpoint
    assert before["step"] >= manifest.train_step
    assert _value(settings, f"select list(step order by step) = range(1, {steps + 1}) from live_steps")
    second = "select min(step), min(resumed_from_step) from train_steps where incarnation_at = "
    assert _rows(settings, f"{second}(select max(incarnation_at) from train_steps)") == [
        (before["step"] + 1, before["step"])
    ]
    # no trajectory is trained on twice, none above the bound
    assert _value(settings, "select max(n) from (select count(*) as n from live_samples group by trajectory_id)") == 1
    assert _value(settings, "select max(staleness) from live_samples") <= settings.loop.max_staleness
    # trajectories of both lives have one outcome each, and what was in flight is named
    books = _rows(settings, "select kind, in_flight, lost, balanced from conservation")
    assert [(kind, in_flight, balanced) for kind, in_flight, _, balanced in books] == [
        ("trajectories", 0, True),
        ("tokens", 0, True),
    ]
    assert books[0][2] == max(before["in_flight"], 0)
    assert _value(settings, "select count(*) - count(distinct trajectory_id) from outcomes") == 0
    assert _value(settings, "select count(*) from outcomes") > before["outcomes"]
    assert _rows(settings, "select open, balanced from work")[0][1]
    # draws go on: no group comes again, and difficulty is known from the first draw on
    opened = _rows(settings, "select group_id from dispatches where event = 'opened'")
    assert len(opened) == len(set(opened)) > before["draws"]
    assert _value(settings, "select max(num_groups) from task_difficulty") >= 2
    # versions go on, and the evaluator does not score again what it had scored
    versions = WeightStore.of(settings).versions()
    assert versions == list(range(1, versions[-1] + 1))
    assert versions[-1] > manifest.weight_version
    scored = _rows(settings, f"select requested_version from {SCORED} order by 1")
    assert len(scored) == len(set(scored))


def _state(data_dir: Path, name: str) -> Any:
    return next(s for s in Supervisor(data_dir).states() if s.program == name)


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {LIMIT_S} s"
        time.sleep(0.2)


def _rows(settings: Settings, query: str) -> Sequence[Any]:
    with sql.connect(Lake.of(settings)) as lake:
        return lake.execute(query).fetchall()


def _value(settings: Settings, query: str) -> Any:
    return _rows(settings, query)[0][0]
