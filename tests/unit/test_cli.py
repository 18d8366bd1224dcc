"""The `lagoon` command: what it takes, what it refuses, what it says."""

import json
import os
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table

from infra.cli import arguments, doctor, status, tables
from infra.cli.main import COMMANDS, main
from infra.lake import Lake
from infra.stack import health
from infra.stack.bring_up import point
from infra.stack.health import Health, Part
from infra.stack.programs import ROOT
from infra.telemetry import Telemetry
from schemas.errors import BrokerError, SettingsError
from schemas.settings import ENVIRONMENT_FILE, Settings, current, load
from tests.rows import row


def test_without_a_command_it_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)


def test_an_unknown_command_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 2
    assert "there is no command 'fly'" in capsys.readouterr().err


def test_a_wrong_setting_is_one_message_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", f"--run.data_dir={tmp_path}", "--loop.bach_size=3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lagoon up: loop.bach_size: ")
    assert "Traceback" not in error


@pytest.mark.parametrize("command", ["status", "down"])
def test_a_data_folder_that_is_none_is_one_message_and_status_2(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([command, f"--run.data_dir={tmp_path}/file"]) == 2
    assert "look at run.data_dir" in capsys.readouterr().err


def test_a_stack_whose_settings_cannot_be_read_can_be_taken_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "current").mkdir()
    (tmp_path / "current" / "settings.json").write_text('{"run": {"no_such": 1}}')
    assert main(["down", f"--run.data_dir={tmp_path}"]) == 0
    given = load([], [f"--run.data_dir={tmp_path / 'given'}"])
    given.save(given.run.folder / "settings.json")
    monkeypatch.setenv(ENVIRONMENT_FILE, str(given.run.folder / "settings.json"))
    assert main(["down"]) == 0
    assert capsys.readouterr().out == f"down; data stay in {tmp_path}\ndown; data stay in {tmp_path / 'given'}\n"


def test_what_cannot_be_answered_is_one_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--rounds=0"]) == 2
    assert capsys.readouterr().err == "lagoon compare: --rounds is 0; it takes one at least\n"
    assert health.get("http://host:abc", "/health")[0] == 0


def test_a_damaged_table_is_a_message_of_sql_and_a_finding_of_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load([], [f"--run.data_dir={tmp_path}", "--tracking.enabled=false"])
    settings.save(settings.run.folder / "settings.json")
    Lake.of(settings).ensure()
    for log in (settings.run.folder / "lake" / "train_samples" / "_delta_log").glob("*.json"):
        log.write_text("{broken")
    assert main(["sql", "select 1", f"--run.data_dir={tmp_path}", "--run.name=default"]) == 2
    assert "table train_samples" in capsys.readouterr().err
    for check in (doctor.lake, doctor.sampling):
        found = doctor.examine(check, settings)
        assert (found.observed, bool(found.mend)) == ("failed", True)


def test_an_unknown_flag_ends_with_2() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--loud"])
    assert ended.value.code == 2


def test_an_unknown_service_is_refused_with_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "zookeeper", f"--run.data_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "zookeeper" in error
    assert "kafka, mlflow, learner, curate, dispatch, records, rollout-0, evaluator" in error


def test_a_run_without_task_families_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", f"--run.data_dir={tmp_path}"]) == 2
    assert "no task families" in capsys.readouterr().err
    assert not (tmp_path / "stack" / "supervisord.conf").exists()


def test_overrides_and_names_may_come_in_any_order() -> None:
    parser = arguments.parser("up", "")
    parser.add_argument("names", nargs="*")
    args, overrides = arguments.parse(parser, ["--config", "a.toml", "kafka", "--run.seed=1", "--config", "b.toml"])
    assert (args.config, args.names, overrides) == (["a.toml", "b.toml"], ["kafka"], ["--run.seed=1"])


def test_settings_come_from_the_named_run_else_from_the_newest(tmp_path: Path) -> None:
    for name, seed in (("old", 1), ("new", 2)):
        settings = load([], [f"--run.data_dir={tmp_path}", f"--run.name={name}", f"--run.seed={seed}"])
        settings.save(settings.run.folder / "settings.json")
    (tmp_path / "current").symlink_to(tmp_path / "runs" / "new")
    where = f"--run.data_dir={tmp_path}"
    assert arguments.settings_of([], [where]).run.seed == 2
    assert arguments.settings_of([], [where, "--run.name=old"]).run.seed == 1
    assert arguments.settings_of([], [where, "--run.seed=3"]).run.seed == 3
    with pytest.raises(SettingsError, match="lagoon up"):
        arguments.settings_of([], [where, "--run.name=none"])


def test_a_copy_of_a_data_folder_is_a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_FILE, raising=False)
    settings = load([], [f"--run.data_dir={tmp_path}/a/.lagoon", "--run.name=new"])
    settings.save(settings.run.folder / "settings.json")
    point(tmp_path / "a" / ".lagoon" / "current", settings.run.folder)
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    monkeypatch.chdir(tmp_path / "b")
    here = str(tmp_path / "b" / ".lagoon")
    for settings in (arguments.settings_of([], []), arguments.settings_of([], ["--run.name=new"]), current()):
        assert (settings.run.name, settings.run.data_dir) == ("new", here)


def test_sql_answers_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = load([], [f"--run.data_dir={tmp_path}"])
    Lake.of(settings).ensure()
    settings.save(settings.run.folder / "settings.json")
    run = ["--run.name=default", f"--run.data_dir={tmp_path}"]
    assert main(["sql", "select count(*) as n, null as nothing from ledger", "--json", *run]) == 0
    assert json.loads(capsys.readouterr().out) == [{"n": 0, "nothing": None}]
    assert main(["sql", "select 1.5 as x", *run]) == 0
    assert "1.5" in capsys.readouterr().out
    assert main(["sql", "select nothing from nowhere", *run]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_an_answer_wider_than_the_terminal_has_a_line_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    narrow = tables.answer(["n", "name"], [["1", "a"]])
    wide = tables.answer(["n", "name"], [["1", "a" * 300], ["2", "b"]])
    assert isinstance(narrow, Table)
    assert isinstance(wide, str)
    assert wide.split("\n") == ["n     1", f"name  {'a' * 300}", "", "n     2", "name  b", ""]


@pytest.mark.parametrize(("columns", "is_whole"), [("", True), ("0", True), ("80", False), ("160", True)])
def test_where_there_is_no_terminal_columns_says_how_wide_an_answer_may_be(
    columns: str, is_whole: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load([], [f"--run.data_dir={tmp_path}"])
    settings.save(settings.run.folder / "settings.json")
    monkeypatch.setenv("COLUMNS", columns)
    query = "select * from cost_per_effective_sample"  # of one row, 135 columns wide as a table
    assert main(["sql", query, "--run.name=default", f"--run.data_dir={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any({"busy_ratio", "cost_per_effective_sample"} <= {*line.split()} for line in lines) == is_whole
    assert max(map(len, lines)) <= (int(columns or 0) or tables.PIPE_WIDTH)


@pytest.mark.parametrize(("width", "columns", "is_whole"), [(40, "", False), (60, "", True), (60, "40", False)])
def test_an_answer_fits_the_terminal_or_else_columns(width: int, columns: str, is_whole: bool) -> None:
    ours, its = os.openpty()
    termios.tcsetwinsize(its, (24, width))
    code = "from infra.cli import tables; tables.show(tables.answer(['a' * 20, 'b' * 20], [['1', '2']]))"
    command, environment = [sys.executable, "-c", code], os.environ | {"COLUMNS": columns}
    subprocess.run(command, cwd=ROOT, env=environment, stdin=its, stdout=its, stderr=its, timeout=60, check=True)
    os.close(its)
    lines = os.read(ours, 65536).decode().splitlines()
    os.close(ours)
    assert any("a" * 20 in line and "b" * 20 in line for line in lines) == is_whole


@pytest.mark.parametrize(
    ("state", "ok", "health"),
    [("stopped", False, ""), ("stopped", True, "well"), ("fatal", False, "not well"), ("remote", False, "not well")],
)
def test_what_was_stopped_on_purpose_is_not_called_unwell(state: str, ok: bool, health: str) -> None:
    assert str(status.told(Part("kafka", state, 0, Health(ok)))[0]) == health


def test_doctor_turns_an_error_into_a_finding_with_its_mend() -> None:
    def broken(_: Settings) -> doctor.Finding:
        raise BrokerError("no broker; start one")

    assert doctor.examine(broken, Settings()).mend == "no broker; start one"


def test_doctor_calls_a_service_on_another_machine_neither_well_nor_gone(tmp_path: Path) -> None:
    settings = load([], [f"--run.data_dir={tmp_path}"])
    telemetry = Telemetry(settings, "rollout", "rollout-7")
    try:
        telemetry.health(True)
        assert doctor.services(settings) == doctor.Finding("1 are well")
        [file] = (settings.run.folder / "services").glob("*.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"machine": "another", "pid": 2**22 + 1}))
        assert doctor.services(settings) == doctor.Finding("none is running, 1 on other machines, not asked")
    finally:
        telemetry.close()


def test_doctor_names_the_place_with_too_little_room(tmp_path: Path) -> None:
    settings = load([], [f"--run.data_dir={tmp_path}", f"--stack.min_free_bytes={10**18}"])
    assert "stack.min_free_bytes" in doctor.disk(settings).mend
    assert not doctor.disk(load([], [f"--run.data_dir={tmp_path}", "--stack.min_free_bytes=0"])).mend


def test_doctor_tries_the_weight_store_with_concurrent_writers(tmp_path: Path) -> None:
    finding = doctor.weight_store(load([], [f"--run.data_dir={tmp_path}"]))
    assert not finding.mend
    assert "one of 8 writers wins" in finding.observed


@pytest.mark.parametrize("shift", [0, 1])
def test_doctor_notices_logprobs_that_are_a_place_off(tmp_path: Path, shift: int) -> None:
    # 20 tokens, logprobs in turn -0.5 and -2: at their own places every ratio is 1, a place off exp(1.5) or exp(-1.5)
    logprobs = np.array([-0.5, -2.0] * 10)
    ratio = float(np.exp(logprobs - np.roll(logprobs, shift)).mean())
    assert ratio == pytest.approx([1.0, (4.4817 + 0.2231) / 2][shift], abs=1e-3)
    settings = load([], [f"--run.data_dir={tmp_path}"])
    lake = Lake.of(settings)
    lake.ensure()
    assert not doctor.sampling(settings).mend  # before the first step
    steps = [(1, 1), (2, 1), (3, 2)]  # number and version; the second is not the first after a publication
    lake.append(
        "train_steps", [row("train_steps", step=n, weight_version=v, incarnation="i") for n, v in steps], "t", 1
    )
    samples = [(1, 0, ratio), (2, 0, 9.0), (3, 0, ratio), (3, 1, 9.0)]
    names = ("step", "staleness", "importance_ratio_mean")
    rows = [row("train_samples", incarnation="i", **dict(zip(names, sample, strict=True))) for sample in samples]
    lake.append("train_samples", rows, "t", 1)
    finding = doctor.sampling(settings)
    assert finding.observed == f"importance ratio {ratio:.3f} at equal weights, over 2 trajectories"
    assert ("shifted by a place" in finding.mend) == bool(shift)


def test_a_reader_that_has_had_enough_sees_no_traceback() -> None:
    command = [sys.executable, "-m", "infra.cli.main", "--help"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 1
