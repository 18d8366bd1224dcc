"""What a process shows of itself, and how it ends."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog

from infra.logs import configure, logger
from infra.telemetry import Stop, Telemetry, instance_name
from schemas.errors import SettingsError
from schemas.settings import Kafka, Run, Settings
from schemas.settings import Telemetry as TelemetrySettings

ROOT = Path(__file__).parents[2]
SECRET = 'hunter2"and\\more'


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(run=Run(name="r1", data_dir=str(tmp_path)))


@pytest.fixture
def telemetry(settings: Settings) -> Iterator[Telemetry]:
    telemetry = Telemetry(settings, "rollout", "rollout-0")
    yield telemetry
    telemetry.close()


def _get(telemetry: Telemetry, path: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(f"http://{telemetry.host}:{telemetry.port}{path}", timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def _service_file(settings: Settings) -> Path:
    return settings.run.folder / "services" / "rollout-rollout-0.json"


def test_health_is_red_until_reported_then_as_reported_with_its_reason(telemetry: Telemetry) -> None:
    seen = []
    for report in (None, (True, ""), (False, "no weights for 60 s")):
        if report:
            telemetry.health(*report)
        code, content_type, body = _get(telemetry, "/healthz")
        answer = json.loads(body)
        seen.append((code, answer["ok"], answer["reason"]))
        assert content_type == "application/json"
        assert (answer["service"], answer["instance"], answer["pid"]) == ("rollout", "rollout-0", os.getpid())
        assert datetime.fromisoformat(answer["reported_at"]).utcoffset() == timedelta(0)
    assert seen == [(503, False, "starting"), (200, True, ""), (503, False, "no weights for 60 s")]


def test_metrics_show_health(telemetry: Telemetry) -> None:
    telemetry.health(True)
    code, _, body = _get(telemetry, "/metrics?name[]=ignored")
    assert code == 200
    assert 'lagoon_healthy{instance="rollout-0",service="rollout"} 1.0' in body


def test_other_paths_are_not_found(telemetry: Telemetry) -> None:
    assert _get(telemetry, "/../settings.json")[0] == 404


def test_the_service_file_says_where_and_goes_when_the_service_closes(settings: Settings) -> None:
    telemetry = Telemetry(settings, "rollout", "rollout-0")
    assert json.loads(_service_file(settings).read_text()) == {
        "service": "rollout",
        "instance": "rollout-0",
        "machine": socket.gethostname(),
        "folder": os.path.realpath(settings.run.folder),
        "pid": os.getpid(),
        "host": "127.0.0.1",
        "port": telemetry.port,
    }
    telemetry.close()
    assert list(_service_file(settings).parent.iterdir()) == []


def test_the_service_file_of_a_successor_stays(settings: Settings) -> None:
    first = Telemetry(settings, "rollout", "rollout-0")
    second = Telemetry(settings, "rollout", "rollout-0")
    first.close()
    assert json.loads(_service_file(settings).read_text())["port"] == second.port
    second.close()


def test_an_instance_name_cannot_leave_the_folder(settings: Settings) -> None:
    telemetry = Telemetry(settings, "rollout", "../../x y:1")
    assert [f.name for f in (settings.run.folder / "services").iterdir()] == ["rollout-.._.._x_y_1.json"]
    telemetry.close()


def test_a_taken_port_is_a_settings_error(telemetry: Telemetry, settings: Settings) -> None:
    taken = settings.model_copy(update={"telemetry": TelemetrySettings(port=telemetry.port)})
    with pytest.raises(SettingsError, match=rf"telemetry\.port {telemetry.port}.*port 0"):
        Telemetry(taken, "learner", "learner-0")


def test_an_instance_is_named_by_the_environment_else_by_host_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGOON_INSTANCE", "rollout-3")
    assert instance_name("rollout") == "rollout-3"
    monkeypatch.delenv("LAGOON_INSTANCE")
    assert instance_name("rollout").startswith("rollout-")
    assert instance_name("rollout").endswith(f"-{os.getpid()}")


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """What was logged since the last call, as objects; the loggers are as before afterwards."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    structlog.reset_defaults()


def test_a_log_line_is_an_object_with_time_level_names_event_and_fields(lines: Any) -> None:
    configure("info")
    before = datetime.now(UTC)
    logger("learner", "learner-0").warning("slow", wait_s=1.5, path=Path("/x"))
    (line,) = lines()
    assert list(line) == ["time", "level", "service", "instance", "event", "wait_s", "path"]
    assert before <= datetime.fromisoformat(line.pop("time")) <= datetime.now(UTC)
    assert line == {
        "level": "warning",
        "service": "learner",
        "instance": "learner-0",
        "event": "slow",
        "wait_s": 1.5,
        "path": "/x",
    }


def test_levels_below_the_set_one_are_left_out(lines: Any) -> None:
    log = logger("learner")
    for level in ("debug", "info", "warning", "error"):
        configure(level)
        for method in (log.debug, log.info, log.warning, log.error):
            method("x")
        logged = [line["level"] for line in lines()]
        assert logged == ["debug", "info", "warning", "error"][-len(logged) :]
        assert logged[0] == level


def test_logs_of_libraries_take_the_same_form(lines: Any) -> None:
    configure("info", "curate", "curate-0")
    try:
        raise ValueError("lost")
    except ValueError:
        logging.getLogger("some.library").exception("bad %s", "thing")
    (line,) = lines()
    assert (line["level"], line["service"], line["instance"], line["event"]) == (
        "error",
        "curate",
        "curate-0",
        "bad thing",
    )
    assert "ValueError: lost" in line["exception"]


def test_what_json_cannot_hold_is_logged_as_text(lines: Any) -> None:
    configure("info")
    logger("learner").info("step", loss=float("nan"), num_tokens=3, by_key={(1, 2): float("inf")})
    (line,) = lines()
    assert (line["event"], line["loss"], line["num_tokens"], line["by_key"]) == ("step", "nan", "3", "{(1, 2): inf}")


def test_a_secret_is_masked_wherever_it_appears(lines: Any) -> None:
    configure("info", secrets=[SECRET, ""])
    logger("learner").info(f"refused {SECRET}", reason=f"x{SECRET}y", nested={"a": [SECRET]})
    logging.getLogger("some.library").warning("said %s", SECRET)
    first, second = lines()
    assert (first["event"], first["reason"], first["nested"]) == ("refused ***", "x***y", {"a": ["***"]})
    assert second["event"] == "said ***"


def test_a_wait_on_stop_ends_when_it_is_set_in_every_thread() -> None:
    stop, seen = Stop(), []
    threads = [threading.Thread(target=lambda: seen.append(stop.wait(60))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not stop
    assert stop.wait(0) is False
    stop.set()
    stop.set()
    for thread in threads:
        thread.join(30)
    assert seen == [True, True, True]
    assert stop.wait(60) is True
    assert stop


PROGRAM = """
import sys
from infra.telemetry import main
from schemas.errors import BrokerError

def run(settings, telemetry, stop):
    telemetry.health(True)
    print(settings.run.name, settings.loop.max_staleness, telemetry.instance, flush=True)
    if settings.policy.path == "wait":
        stop.wait(60)
        print("stopped", bool(stop), flush=True)
    elif settings.policy.path == "refuse":
        raise BrokerError("Kafka is away")
    elif settings.policy.path == "crash":
        raise KeyError("surprise")

main("learner", run)
"""


def _start(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(tmp_path: Path, *arguments: str, **environment: str) -> tuple[int, str, list[dict[str, Any]]]:
    process = _start(tmp_path, *arguments, **environment)
    out, err = process.communicate(timeout=60)
    assert process.returncode is not None
    return process.returncode, out, [json.loads(line) for line in err.splitlines()]


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "my.toml"
    file.write_text(f'[run]\nname = "r1"\ndata_dir = "{tmp_path}"\n')
    return f"--config={file}"


def test_a_clean_end_is_0_and_leaves_no_service_file(tmp_path: Path, config: str) -> None:
    code, out, logged = _run(tmp_path, config, "--loop.max_staleness=5", LAGOON_INSTANCE="learner-7")
    assert (code, out) == (0, "r1 5 learner-7\n")
    assert list((tmp_path / "runs" / "r1" / "services").iterdir()) == []
    assert {(line["service"], line["instance"]) for line in logged} == {("learner", "learner-7")}


def test_an_error_raised_on_purpose_is_1_with_its_message_and_no_traceback(tmp_path: Path, config: str) -> None:
    code, _, logged = _run(tmp_path, config, "--policy.path=refuse")
    assert code == 1
    assert (logged[-1]["kind"], logged[-1]["error"]) == ("BrokerError", "Kafka is away")
    assert not any("traceback" in line or "exception" in line for line in logged)


def test_any_other_error_is_1_with_its_traceback(tmp_path: Path, config: str) -> None:
    code, _, logged = _run(tmp_path, config, "--policy.path=crash")
    assert code == 1
    assert "KeyError: 'surprise'" in logged[-1]["traceback"]
    assert list((tmp_path / "runs" / "r1" / "services").iterdir()) == []


@pytest.mark.parametrize("argument", ["--loop.such=1", "--loop.max_staleness=-1", "--loop.max_staleness", "stray"])
def test_a_wrong_argument_is_2_and_named(tmp_path: Path, config: str, argument: str) -> None:
    code, out, logged = _run(tmp_path, config, argument)
    assert (code, out, logged[-1]["kind"]) == (2, "", "SettingsError")
    assert argument.strip("-").partition("=")[0] in logged[-1]["error"]


def test_without_a_file_the_settings_are_those_of_the_current_run(tmp_path: Path) -> None:
    Settings(run=Run(name="r2", data_dir=str(tmp_path))).save(tmp_path / "settings.json")
    file = str(tmp_path / "settings.json")
    code, out, _ = _run(tmp_path, "--loop.max_staleness=4", LAGOON_SETTINGS=file, LAGOON_INSTANCE="learner-0")
    assert (code, out) == (0, "r2 4 learner-0\n")


def test_without_file_and_run_the_error_says_what_to_do(tmp_path: Path) -> None:
    code, _, logged = _run(tmp_path, LAGOON_SETTINGS=str(tmp_path / "none.json"))
    assert code == 2
    assert "lagoon up" in logged[-1]["error"]


def test_the_argument_that_the_deepspeed_launcher_adds_is_no_setting(tmp_path: Path, config: str) -> None:
    assert _run(tmp_path, "--local_rank=0", config)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_and_the_process_cleanly(tmp_path: Path, config: str, number: signal.Signals) -> None:
    process = _start(tmp_path, config, "--policy.path=wait")
    assert process.stdout is not None
    process.stdout.readline()  # it runs
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "stopped True\n")


def test_secrets_of_the_settings_never_reach_the_log(tmp_path: Path) -> None:
    settings = Settings(
        run=Run(name="r3", data_dir=str(tmp_path)),
        kafka=Kafka(brokers="k:9092", secrets={"sasl.password": "KAFKA_PASSWORD"}),
    )
    settings.save(tmp_path / "settings.json")
    program = PROGRAM.replace('"Kafka is away"', 'repr(__import__("os").environ)')
    others = ("AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
    secrets = {"KAFKA_PASSWORD": SECRET} | {name: f"value-of-{name}" for name in others}
    process = subprocess.run(
        [sys.executable, "-c", program, f"--config={tmp_path}/settings.json", "--policy.path=refuse"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **secrets},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert "***" in process.stderr
    assert [value for value in secrets.values() if value in process.stderr] == []
