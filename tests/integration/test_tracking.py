"""Tracking against a real MLflow server, and against none."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from mlflow import MlflowClient

from infra.stack.ports import free_port
from infra.tracking import MAX_POINTS, Tracking
from schemas.settings import Run, Settings
from schemas.settings import Tracking as TrackingSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mlflow")
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        _wait(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait(60)


def _wait(url: str, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.fixture
def settings(server: str) -> Settings:
    experiment = f"e{uuid.uuid4().hex[:8]}"
    return Settings(run=Run(name="demo"), tracking=TrackingSettings(uri=server, experiment=experiment))


def history(settings: Settings, run_id: str, key: str) -> list[tuple[int, float]]:
    found = MlflowClient(settings.tracking.uri).get_metric_history(run_id, key)
    return sorted((metric.step, metric.value) for metric in found)


def test_metrics_and_the_settings_that_shape_the_run_arrive(settings: Settings):
    tracking = Tracking(settings, "learner", wait_s=60)
    assert tracking.run_id
    for step in range(1, 4):
        tracking.metrics({"loss": 1 / step, "kl": 0.0}, step)
    tracking.close(60)
    assert history(settings, tracking.run_id, "loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    run = MlflowClient(settings.tracking.uri).get_run(tracking.run_id)
    assert (run.info.run_name, run.info.status, run.data.tags["lagoon.run"]) == ("learner", "FINISHED", "demo")
    assert run.data.params["loop.max_staleness"] == "3"
    assert not [key for key in run.data.params if "storage_options" in key or "secrets" in key]


def test_a_resumed_run_has_one_value_per_step(settings: Settings):
    """Checkpoint at 2, crash at 4: steps 3 and 4 are made again, and 5 is new."""
    first = Tracking(settings, "learner", wait_s=60)
    for step in range(1, 5):
        first.metrics({"loss": float(step)}, step)
    first.close(60)
    second = Tracking(settings, "learner", resume_run_id=first.run_id, wait_s=60)
    assert second.run_id == first.run_id
    for step in range(3, 6):
        second.metrics({"loss": 10.0 * step}, step)
    second.close(60)
    assert history(settings, str(first.run_id), "loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)]


def test_a_late_score_of_an_older_version_still_stands_at_that_version(settings: Settings):
    tracking = Tracking(settings, "evaluator", wait_s=60)
    for version, score in ((49, 0.4), (53, 0.6), (50, 0.5)):
        tracking.metrics({"score": score}, version)
    tracking.close(60)
    resumed = Tracking(settings, "evaluator", resume_run_id=tracking.run_id, wait_s=60)
    resumed.metrics({"score": 0.55}, 51)
    resumed.close(60)
    expected = [(49, 0.4), (50, 0.5), (51, 0.55), (53, 0.6)]
    assert history(settings, str(tracking.run_id), "score") == expected


def test_a_run_that_mlflow_has_lost_is_begun_anew(settings: Settings):
    tracking = Tracking(settings, "learner", resume_run_id="0" * 32, wait_s=60)
    tracking.close(60)
    assert tracking.run_id not in (None, "0" * 32)


def test_weight_versions_are_registered_once_with_their_lineage(settings: Settings):
    tags = {"fingerprint": "ab" * 32, "train_step": "20", "delta_version": "7", "parent": "0"}
    first = Tracking(settings, "learner", wait_s=60)
    first.weight_version(1, "/data/weights/v00000001", tags)
    first.weight_version(2, "s3://bucket/weights/v00000002", tags)
    first.alias("latest", 2)
    first.close(60)
    second = Tracking(settings, "learner", resume_run_id=first.run_id, wait_s=60)
    second.weight_version(2, "s3://bucket/weights/v00000002", tags)
    second.close(60)
    client = MlflowClient(settings.tracking.uri)
    model = f"{settings.tracking.experiment}-policy"
    found = sorted(client.search_model_versions(f"name = '{model}'"), key=lambda v: int(v.version))
    assert [v.tags["weight_version"] for v in found] == ["1", "2"]
    assert [v.tags["uri"] for v in found] == ["/data/weights/v00000001", "s3://bucket/weights/v00000002"]
    assert found[0].tags.items() >= tags.items()
    assert found[0].run_id == first.run_id
    assert client.get_model_version_by_alias(model, "latest").tags["weight_version"] == "2"


def test_a_run_begun_again_under_its_old_name_registers_its_own_weights(settings: Settings):
    for fingerprint in ("aa", "bb"):
        tracking = Tracking(settings, "learner", wait_s=60)
        tracking.weight_version(1, "/data/weights/v00000001", {"fingerprint": fingerprint})
        tracking.alias("champion", 1)
        tracking.close(60)
    client = MlflowClient(settings.tracking.uri)
    found = client.get_model_version_by_alias(f"{settings.tracking.experiment}-policy", "champion")
    assert found.tags["fingerprint"] == "bb"


def test_champion_waits_until_its_version_is_registered(settings: Settings):
    evaluator = Tracking(settings, "evaluator", wait_s=60)
    evaluator.alias("champion", 1)
    learner = Tracking(settings, "learner", wait_s=60)
    learner.weight_version(1, "s3://bucket/weights/v00000001", {})
    learner.close(60)
    evaluator.alias("champion", 1)
    evaluator.close(60)
    client = MlflowClient(settings.tracking.uri)
    found = client.get_model_version_by_alias(f"{settings.tracking.experiment}-policy", "champion")
    assert found.tags["weight_version"] == "1"


def test_a_point_that_mlflow_refuses_is_dropped_and_the_next_ones_arrive(settings: Settings):
    tracking = Tracking(settings, "learner", wait_s=60)
    tracking.metrics({"not a valid \n name": 1.0}, 1)
    _until(lambda: tracking.num_dropped > 0)
    tracking.metrics({"loss": 1.0}, 1)
    tracking.close(60)
    assert tracking.num_dropped == 1
    assert history(settings, str(tracking.run_id), "loss") == [(1, 1.0)]


def _until(condition, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def unreachable() -> Settings:
    return Settings(tracking=TrackingSettings(uri=f"http://127.0.0.1:{free_port()}"))


def test_without_a_server_the_oldest_points_are_given_up_and_counted(unreachable: Settings):
    tracking = Tracking(unreachable, "learner", wait_s=0)
    for step in range(MAX_POINTS + 5):
        tracking.metrics({"loss": 0.0}, step)
    assert tracking.num_dropped == 5
    _until(lambda: tracking.num_failures > 0)
    tracking.close(timeout_s=5)
    assert tracking.num_dropped == MAX_POINTS + 5
    assert tracking.run_id is None


def test_a_resumed_run_is_known_by_its_id_while_the_server_is_away(unreachable: Settings):
    tracking = Tracking(unreachable, "learner", resume_run_id="1" * 32, wait_s=0)
    tracking.close(timeout_s=5)
    assert tracking.run_id == "1" * 32


def test_tracking_that_is_switched_off_does_nothing():
    tracking = Tracking(Settings(tracking=TrackingSettings(enabled=False)), "learner")
    tracking.metrics({"loss": 1.0}, 1)
    tracking.weight_version(1, "/weights/v1", {})
    tracking.alias("champion", 1)
    tracking.close()
    assert (tracking.run_id, tracking.num_failures, tracking.num_dropped) == (None, 0, 0)
