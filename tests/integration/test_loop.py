"""The whole loop on real parts, with each of its processes killed -9 once in mid-run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra import sql
from infra.lake import Lake
from infra.stack.programs import ROOT
from infra.stack.supervise import Supervisor
from schemas.settings import Settings, load

LIMIT_S = 420
VICTIMS = ("rollout-0", "curate", "learner", "evaluator", "dispatch", "records")
OVERRIDES = (
    "--learner.num_train_steps=40",
    "--policy.warm_start_steps=250",
    "--evaluator.samples_per_family=8",
    "--learner.sync_interval_start=2",
    "--learner.sync_interval=3",
)


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loop_survives_a_kill_of_each_process_and_the_books_balance(tmp_path: Path) -> None:
    log = tmp_path / "demo.log"
    with open(log, "wb") as output:
        demo = subprocess.Popen(
            [sys.executable, "-m", "infra.cli.main", "demo", f"--run.data_dir={tmp_path / 'data'}", *OVERRIDES],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        try:
            settings = _kill_each(tmp_path / "data", demo)
            assert demo.wait(LIMIT_S) == 0, log.read_text()[-4000:]
        finally:
            if demo.poll() is None:
                demo.send_signal(signal.SIGTERM)
                demo.wait(120)
    last = log.read_text().strip().splitlines()[-1]
    assert last.startswith("summary: ")
    _check_summary(json.loads(Path(last.removeprefix("summary: ")).read_text()))
    _check_lake(settings)


def _kill_each(data_dir: Path, demo: subprocess.Popen[bytes]) -> Settings:
    """Kill the victims one after the other, each when the learner has taken some more steps since the last."""
    saved = data_dir / "current" / "settings.json"
    _wait(saved.exists, demo, "the run's settings")
    settings = load([saved])
    supervisor = Supervisor(data_dir)
    for number, victim in enumerate(VICTIMS):
        _wait(lambda step=3 + 4 * number: _steps(settings) >= step, demo, f"step {3 + 4 * number}")
        state = next(s for s in supervisor.states() if s.program == victim)
        os.kill(state.pid, signal.SIGKILL)
    return settings


def _wait(condition: Callable[[], bool], demo: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert demo.poll() is None, f"the demo ended before {what}"
        assert time.monotonic() < deadline, f"no {what} within {LIMIT_S} s"
        time.sleep(0.2)


def _steps(settings: Settings) -> int:
    return _value(settings, "select coalesce(max(step), 0) from train_steps")


def _value(settings: Settings, query: str) -> Any:
    with sql.connect(Lake.of(settings)) as lake:
        row = lake.execute(query).fetchone()
    assert row is not None
    return row[0]


def _check_summary(summary: dict[str, Any]) -> None:
    for row in (*summary["conservation"].values(), summary["work"]):
        assert row["balanced"], summary
    assert summary["conservation"]["trajectories"]["in_flight"] == 0
    assert summary["train_steps"] == 40
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    assert all(check["passed"] for check in summary["checks"].values()), summary["checks"]


def _check_lake(settings: Settings) -> None:
    assert _value(settings, "select count(*) - count(distinct trajectory_id) from experience") == 0
    outcomes = "('admitted', 'stale', 'duplicate', 'no_signal', 'invalid')"
    assert (
        _value(settings, f"select count(*) - count(distinct trajectory_id) from ledger where event in {outcomes}") == 0
    )
    assert _value(settings, "select list(distinct step order by step) = range(1, 41) from step_lineage")
    explained = "select count(*) from step_lineage where task_id is null or delta_version is null or staleness > 3"
    assert _value(settings, explained) == 0
    assert (
        _value(settings, "select max(uses) from (select count(*) as uses from step_lineage group by trajectory_id)")
        == 1
    )
    assert _value(settings, "select count(distinct incarnation) from train_steps") >= 2
