"""Each peer hangs in turn, and whoever waits for it says why, decides, and goes on when it is back.

Elsewhere: tools, engines and verifiers that never answer (`test_agent`), a learner without data (`test_learner`), tasks
that nobody rolls out (`test_dispatch_kafka`), full disks, slow stores, clocks (`test_full_disk` and its neighbors).
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.engines import base, torch_engine
from inference.engines.base import EngineError
from inference.engines.torch_engine import TorchEngine
from inference.serving import Server
from infra import retries
from infra.cli import doctor
from infra.kafka import ensure_topics
from infra.lake import Lake
from infra.stack.kafka import LocalKafka
from infra.stack.ports import free_port
from infra.stack.programs import ROOT
from infra.tracking import Tracking
from infra.waits import WAITS
from schemas.errors import LakeError
from schemas.names import ErrorKind, Status
from schemas.settings import ENVIRONMENT_FILE, Kafka, Settings
from tests.failing_service import FAULT
from tests.integration.test_exactly_once import COPY, Run, wait_until
from tests.policies import write_policy
from tests.rollout_fakes import FakeStore
from tests.rollout_process import (
    GROUP_SIZE,
    INSTANCE,
    Service,
    prepare_rollouts,
    received,
    send_tasks,
    until,
)


@pytest.fixture
def silent() -> Iterator[int]:
    """Port of a server that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def test_a_store_that_never_answers_is_shown_while_it_lasts_and_then_an_error(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "LIMIT_S", 2)
    monkeypatch.setattr("infra.waits.SHOWN_AFTER_S", 0.0)
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    limits = {"TIMEOUT": "1s", "RETRY_TIMEOUT": "1s", "MAX_RETRIES": "0", "AWS_ALLOW_HTTP": "true"}
    lake = Lake("s3://lagoon/lake", keys | limits | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent}"})
    seen: list[str] = []
    note = "infra.waits.Wait.note"
    monkeypatch.setattr(note, lambda wait, reason: (setattr(wait, "reason", reason), seen.append(WAITS.fault())))
    with pytest.raises(LakeError, match="groups: reading its version failed"):
        lake.version("groups")
    assert "groups: reading its version: waiting for" in seen[0]
    assert "of 2 s, then this process ends with status 1" in seen[0]
    assert WAITS.fault() == ""


def test_an_mlflow_that_never_answers_costs_figures_and_no_time(
    silent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracking = Tracking(
        Settings.model_validate(
            {"run": {"data_dir": str(tmp_path)}, "tracking": {"uri": f"http://127.0.0.1:{silent}"}}
        ),
        "run",
        wait_s=0.1,
    )
    assert tracking.run_id is None
    tracking.metrics({"loss": 1.0, "reward": 0.5}, 1)
    tracking.close(timeout_s=0.1)
    assert tracking.num_dropped == 2


def test_an_engine_that_never_loads_is_an_error_of_that_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()

    def read(folder: Path, *_: object) -> Any:
        never.wait()

    async def swap() -> None:
        engine = TorchEngine(write_policy(tmp_path / "policy"), 1, max_sessions=1, max_tokens=8)
        monkeypatch.setattr(torch_engine, "Llama", read)
        monkeypatch.setattr(base, "LOAD_S", 0.05)
        try:
            with pytest.raises(EngineError, match=r"did not read version 2 within 0\.05 s"):
                await engine.load(2, tmp_path)
            with pytest.raises(EngineError, match=r"did not read version 1 within 0\.05 s"):
                await Server(FakeStore({1: (-1.0, -2.0)}), read, tmp_path, "fp32").serve(1)
        finally:
            never.set()
            await engine.close()

    asyncio.run(swap())


@pytest.mark.kafka
@pytest.mark.slow
def test_an_engine_that_always_fails_is_named_costs_no_row_and_heals_without_a_restart(
    tmp_path: Path, kafka: Kafka
) -> None:
    """NVIDIA-NeMo/RL#3488: all engines dead, and nobody said so."""
    settings, fault = prepare_rollouts(tmp_path, kafka), tmp_path / "fault"
    settings.save(settings.run.folder / "settings.json")
    fault.touch()
    environment = {ENVIRONMENT_FILE: str(settings.run.folder / "settings.json"), "LAGOON_INSTANCE": INSTANCE}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.failing_service"],
        cwd=ROOT,
        env=os.environ | environment | {FAULT: str(fault), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        send_tasks(kafka, range(10))
        sick = f"rollout-{INSTANCE}: the engine failed "
        until(lambda: sick in doctor.examine(doctor.services, settings).mend)
        until(lambda: sum(len(m.rows) for m in received(kafka)) == 10 * GROUP_SIZE)
        rows = [row for message in received(kafka) for row in message.rows]
        assert {(r.status, r.error_kind, r.reward) for r in rows} == {(Status.FAILED, ErrorKind.ENGINE, None)}
        assert all("HTTP 500" in (r.error or "") and r.num_prompt_tokens for r in rows)
        fault.unlink()
        send_tasks(kafka, range(100, 102))
        until(lambda: sum(len(m.rows) for m in received(kafka)) == 12 * GROUP_SIZE)
        healed = [r for m in received(kafka) for r in m.rows if r.error_kind != ErrorKind.ENGINE]
        assert len(healed) == 2 * GROUP_SIZE
        until(lambda: doctor.examine(doctor.services, settings).mend == "")
        process.send_signal(signal.SIGSTOP)  # hung: it says nothing any more
        until(lambda: f"rollout-{INSTANCE}: no answer" in doctor.examine(doctor.services, settings).mend)
    finally:
        process.kill()
        process.wait(10)
    assert "is gone" in doctor.examine(doctor.services, settings).mend


@pytest.mark.kafka
@pytest.mark.slow
def test_a_broker_that_hangs_ends_a_flow_and_holds_episodes_back_until_it_answers(tmp_path: Path) -> None:
    local = LocalKafka(ROOT / ".lagoon" / "kafka", tmp_path / "kafka" / "data", free_port(), free_port())
    broker = subprocess.Popen(local.prepare(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kafka = Kafka(brokers=local.address, partitions=4, timeout_s=8)
    patient = kafka.model_copy(update={"timeout_s": 60})
    service: Service | None = None
    try:
        for prefix in ("", "flow."):
            ensure_topics(patient.model_copy(update={"topic_prefix": prefix}), timeout_s=60)
        run = Run(kafka.model_copy(update={"topic_prefix": "flow."}), tmp_path / "flow")
        flow = run.start(COPY)
        settings = prepare_rollouts(tmp_path / "rollout", kafka, create=False)
        service = Service(settings)
        until(lambda: service.health()[0])
        run.send("trajectories", 8, partitions=4)
        wait_until(lambda: run.rows("dead_letters", "topic").total() == 8)
        broker.send_signal(signal.SIGSTOP)
        assert flow.wait(120) == 1
        assert "the broker has been away" in (run.folder / "log").read_text()
        broker.send_signal(signal.SIGCONT)
        send_tasks(patient, range(4))
        until(lambda: sum(len(m.rows) for m in received(patient)) == 4 * GROUP_SIZE)
        until(lambda: service.health()[0])
    finally:
        for process in (broker, *([service.process] if service else [])):
            process.kill()
            process.wait(10)
