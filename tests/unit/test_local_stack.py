"""The parts of the local stack that need no server: ports, programs, Java, the policy's key."""

import json
import os
import random
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.locks import locked
from infra.stack import container, health, java, kafka, policy, ports, programs, supervise, supervisord
from infra.stack.bring_up import exclusive, resolve, wait_until_up
from infra.stack.policy import policy_key
from infra.stack.supervise import MAX_SOCKET_PATH, State, Supervisor
from infra.telemetry import Telemetry
from schemas.errors import SettingsError, StackError
from schemas.settings import Family, Settings, load


def _settings(folder: Path, *overrides: str) -> Settings:
    return load([], [f"--run.data_dir={folder}", *overrides])


def test_a_server_keeps_its_port(tmp_path: Path) -> None:
    first = ports.remembered(tmp_path, "kafka")
    assert ports.remembered(tmp_path, "kafka") == first
    assert ports.remembered(tmp_path, "kafka", wanted=20_123) == 20_123
    assert ports.remembered(tmp_path, "kafka") == 20_123


def test_processes_that_choose_a_port_at_once_take_the_same_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert len({*pool.map(lambda _: ports.remembered(tmp_path, "kafka"), range(16))}) == 1


def test_a_server_of_a_saved_run_stays_local_when_it_is_given_another_port(tmp_path: Path) -> None:
    """What the error about a taken port advises."""
    saved = resolve(_settings(tmp_path))
    options = ("--stack.kafka_port=20123", "--stack.mlflow_port=20124")
    again = resolve(load([], [f"--run.data_dir={tmp_path}", *options, *_addresses(saved)]))
    assert _addresses(again) == ["--kafka.brokers=127.0.0.1:20123", "--tracking.uri=http://127.0.0.1:20124"]
    assert _addresses(resolve(saved)) == _addresses(again)  # another run of this folder, saved before


def test_a_copied_data_folder_has_ports_of_its_own_and_keeps_them(tmp_path: Path) -> None:
    names = ("kafka", "kafka_controller", "mlflow")
    saved = resolve(_settings(tmp_path / "a"))
    first = [ports.remembered(tmp_path / "a", name) for name in names]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = resolve(load([], [f"--run.data_dir={tmp_path / 'b'}", *_addresses(saved)]))
    second = [ports.remembered(tmp_path / "b", name) for name in names]
    assert not {*first} & {*second}
    assert _addresses(copied) == [
        f"--kafka.brokers=127.0.0.1:{second[0]}",
        f"--tracking.uri=http://127.0.0.1:{second[2]}",
    ]
    assert [ports.remembered(tmp_path / "b", name) for name in names] == second
    assert [ports.remembered(tmp_path / "a", name) for name in names] == first


def test_a_port_that_is_given_to_one_server_of_a_copy_moves_the_others_too(tmp_path: Path) -> None:
    first = {name: ports.remembered(tmp_path / "a", name) for name in ("kafka", "kafka_controller")}
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert ports.remembered(tmp_path / "b", "kafka", wanted=20_123) == 20_123
    assert ports.remembered(tmp_path / "b", "kafka_controller") not in {0, *first.values()}


def test_a_data_folder_that_another_machine_mounts_elsewhere_keeps_its_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ports.remembered(tmp_path / "a", "kafka")
    shutil.copytree(tmp_path / "a", tmp_path / "mounted")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert ports.remembered(tmp_path / "mounted", "kafka") == first
    assert (tmp_path / "mounted" / "stack.json").read_text() == (tmp_path / "a" / "stack.json").read_text()


def _addresses(settings: Settings) -> list[str]:
    return [f"--kafka.brokers={settings.kafka.brokers}", f"--tracking.uri={settings.tracking.uri}"]


def test_a_chosen_port_is_never_one_of_outgoing_connections() -> None:
    assert all(20_000 <= ports.free_port() < 30_000 for _ in range(20))


def test_two_processes_with_one_seed_choose_other_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[list[int]] = []
    for _ in range(2):
        monkeypatch.setattr(ports, "_dealt", set())  # as in a process that has just begun
        random.seed(1)
        chosen.append([ports.free_port() for _ in range(4)])
    assert chosen[0] != chosen[1]


def test_a_taken_port_is_named_with_the_setting_that_changes_it() -> None:
    with socket.socket() as other:
        other.bind((ports.HOST, 0))
        other.listen()
        with pytest.raises(StackError, match=r"for kafka is taken.*--stack\.kafka_port=N"):
            ports.require_free("kafka", other.getsockname()[1], "stack.kafka_port")


def test_a_malformed_port_file_says_how_to_mend_it(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text("{")
    with pytest.raises(StackError, match="delete it"):
        ports.remembered(tmp_path, "kafka")


def test_no_names_mean_everything_in_starting_order() -> None:
    settings = load([], ["--rollout.services=2"])
    services = ["learner", "curate", "dispatch", "records", "rollout-0", "rollout-1", "evaluator", "maintenance"]
    services.append("warden")
    everything = ["kafka", "mlflow", *services]
    assert programs.select(settings, []) == everything
    assert {type(n) for n in programs.select(settings, [])} == {str}  # XML-RPC takes no enumerations
    assert programs.select(settings, ["rollout", "kafka"]) == ["kafka", "rollout-0", "rollout-1"]
    assert programs.select(settings, ["rollout-1"]) == ["rollout-1"]
    assert "maintenance" not in programs.select(load([], ["--maintenance.enabled=false"]), [])
    with pytest.raises(SettingsError, match="rollout-2"):
        programs.select(settings, ["rollout-2"])


def test_what_writes_stops_before_what_reads_it_and_servers_stop_last() -> None:
    up = ["curate", "kafka", "learner", "records", "rollout-0"]
    assert programs.stopping_order(up) == [["learner", "rollout-0"], ["curate"], ["records"], ["kafka"]]


def test_addresses_in_the_settings_are_left_alone(tmp_path: Path) -> None:
    given = _settings(tmp_path, "--kafka.brokers=broker:9092", "--tracking.uri=http://mlflow:5000")
    settings = resolve(given)
    assert (settings.kafka, settings.tracking) == (given.kafka, given.tracking)
    assert not programs.is_local(settings, "kafka")
    assert not programs.is_local(settings, "mlflow")


def test_missing_addresses_are_those_of_the_local_servers(tmp_path: Path) -> None:
    settings = resolve(_settings(tmp_path, "--run.name=a"))
    assert settings.kafka.brokers == f"127.0.0.1:{ports.remembered(tmp_path, 'kafka')}"
    assert settings.kafka.topic_prefix == "a."
    assert settings.tracking.uri == f"http://127.0.0.1:{ports.remembered(tmp_path, 'mlflow')}"
    assert resolve(settings) == settings


def test_a_process_gets_its_settings_its_name_and_its_threads(tmp_path: Path) -> None:
    settings = _settings(tmp_path, "--run.name=a", "--rollout.services=2", "--rollout.threads=3")
    program = programs.service(settings, "rollout-1")
    assert program.command[1:] == ["-m", "inference.serve"]
    assert program.environment["LAGOON_SETTINGS"] == str(tmp_path / "runs" / "a" / "settings.json")
    assert program.environment["LAGOON_INSTANCE"] == "rollout-1"
    assert program.environment["OMP_NUM_THREADS"] == "3"
    assert programs.service(settings, "curate").command[1:] == ["-m", "flows.curate"]
    assert programs.service(settings, "learner").command[1].endswith("trainers/learn.py")


def test_other_settings_make_another_program(tmp_path: Path) -> None:
    one, same, other = (programs.service(_settings(tmp_path, f"--loop.max_staleness={n}"), "curate") for n in (3, 3, 4))
    assert one == same
    assert one != other


def test_another_number_of_rollout_services_leaves_those_that_run_alone(tmp_path: Path) -> None:
    one, two = (_settings(tmp_path, "--run.name=a", f"--rollout.services={n}") for n in (1, 2))
    for name in programs.service_names(one):
        assert programs.service(one, name) == programs.service(two, name)
    assert {*programs.service_names(two)} - {*programs.service_names(one)} == {"rollout-1"}


def test_the_policy_is_made_anew_only_for_what_it_depends_on(tmp_path: Path) -> None:
    key = policy_key(_settings(tmp_path))
    assert policy_key(_settings(tmp_path, "--run.name=b", "--objective.clip=0.1")) == key
    assert policy_key(_settings(tmp_path, "--run.seed=1")) != key
    assert policy_key(_settings(tmp_path, "--policy.hidden=32")) != key
    assert policy_key(_settings(tmp_path).model_copy(update={"families": (Family(name="add"),)})) != key


@pytest.mark.parametrize(("banner", "major"), [("17.0.15", 17), ("25", 25), ("1.8.0_292", 8), ("21-ea", 0)])
def test_the_major_version_of_java_is_read_from_its_banner(tmp_path: Path, banner: str, major: int) -> None:
    assert java.java_version(_fake_java(tmp_path, banner)) == major


def test_without_java_and_maven_one_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_java(tmp_path, "11.0.2")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(StackError, match=r"Java 17 or newer and Maven .*apt-get install openjdk-17-jre-headless maven"):
        java.command(tmp_path)


def test_jars_that_are_there_need_no_maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = _fake_java(tmp_path, "21.0.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    jars = java.jars_folder(tmp_path)
    jars.mkdir()
    assert java.command(tmp_path) == [system, "-cp", f"{jars}/*"]


def test_a_container_gets_the_same_properties_with_open_listeners(tmp_path: Path) -> None:
    local = kafka.LocalKafka(tmp_path, tmp_path / "data", 20_001, 20_002)
    environment = container.environment(local.properties)
    assert environment["KAFKA_LISTENERS"] == "PLAINTEXT://:20001,CONTROLLER://:20002"
    assert environment["KAFKA_ADVERTISED_LISTENERS"] == "PLAINTEXT://127.0.0.1:20001"
    assert environment["KAFKA_LOG_DIRS"] == "/data"
    assert environment["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"


def test_the_broker_listens_on_loopback_and_creates_no_topics_by_itself(tmp_path: Path) -> None:
    lines = kafka.LocalKafka(tmp_path, tmp_path / "data", 20_001, 20_002).properties.splitlines()
    assert "listeners=PLAINTEXT://127.0.0.1:20001,CONTROLLER://127.0.0.1:20002" in lines
    assert "auto.create.topics.enable=false" in lines
    assert [line for line in lines if "replication.factor" in line and not line.endswith("=1")] == []


def test_a_socket_path_too_long_for_the_kernel_moves_to_a_short_one(tmp_path: Path) -> None:
    deep = Supervisor(tmp_path / ("d" * 120))
    path = deep.socket_path()
    assert len(path) <= MAX_SOCKET_PATH
    assert deep.socket_path() == path


def test_a_copied_data_folder_has_a_socket_of_its_own(tmp_path: Path) -> None:
    for depth in ("short", "d" * 120):
        (tmp_path / depth / "stack").mkdir(parents=True)
        path = Supervisor(tmp_path / depth).socket_path()
        shutil.copytree(tmp_path / depth, tmp_path / f"{depth}2")
        assert Supervisor(tmp_path / f"{depth}2").socket_path() != path


def test_a_data_folder_has_one_socket_and_one_mark_by_whichever_path_it_is_named(tmp_path: Path) -> None:
    for depth in ("short", "d" * 120):
        (tmp_path / depth).mkdir()
        for link in ("l", "l" * 120):
            (tmp_path / f"{depth[:5]}-{link}").symlink_to(tmp_path / depth)
            real, other = Supervisor(tmp_path / depth), Supervisor(tmp_path / f"{depth[:5]}-{link}")
            assert (other.socket_path(), other.data_dir) == (real.socket_path(), real.data_dir)


def test_a_socket_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "TEMPORARY", tmp_path)
    us = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: us + 1)
    deep = Supervisor(tmp_path / ("d" * 120))
    Path(deep.socket_path()).parent.mkdir()
    with pytest.raises(StackError, match="belongs to another user"):
        deep.socket_path()


def test_a_percent_sign_in_a_path_survives_supervisords_expansion(tmp_path: Path) -> None:
    program = programs.Program("p", ["echo", "100% sure"], tmp_path / "50%.log")
    text = supervisord.program(program, {})
    assert "command=echo '100%% sure'" in text
    assert "50%%.log" in text


def test_who_waits_for_a_part_is_told_when_the_supervisor_has_ended(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="has ended, and curate, learner with it"):
        wait_until_up(_settings(tmp_path), Supervisor(tmp_path), ["curate", "learner"], print)


def test_a_process_that_took_an_earlier_ones_pid_and_port_does_not_speak_for_it(tmp_path: Path) -> None:
    telemetry = Telemetry(_settings(tmp_path), "learner", "learner")
    try:
        telemetry.health(True)
        [file] = (tmp_path / "runs" / "default" / "services").glob("*.json")
        assert health.at(file).ok
        address = json.loads(file.read_text())
        file.write_text(json.dumps(address | {"pid": os.getppid()}))
        assert not health.at(file).ok
        file.write_text(json.dumps(address | {"instance": "curate"}))
        assert not health.at(file).ok
    finally:
        telemetry.close()


def test_a_process_of_the_folder_that_this_one_was_copied_from_is_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry = Telemetry(_settings(tmp_path / "a"), "learner", "learner")
    try:
        telemetry.health(True)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        (tmp_path / "link").symlink_to(tmp_path / "a")
        well = {name: health.service(_settings(tmp_path / name), "learner").ok for name in ("a", "b", "link")}
        assert well == {"a": True, "b": False, "link": True}
        file = tmp_path / "b" / "runs" / "default" / "services" / "learner-learner.json"
        address = json.loads(file.read_text())
        monkeypatch.setattr(socket, "gethostname", lambda: "another")  # where the same folder may be mounted as b
        assert health.at(file).is_elsewhere
        file.write_text(json.dumps({key: address[key] for key in address if key not in {"machine", "folder"}}))
        assert health.at(file).ok  # written by an older Lagoon
    finally:
        telemetry.close()


def test_two_commands_cannot_change_one_stack_at_once(tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(StackError, match="another lagoon command"), exclusive(tmp_path):
        pass


def test_who_wants_a_policy_that_another_process_is_making_waits_and_takes_it(tmp_path: Path) -> None:
    settings, said = _settings(tmp_path), list[str]()
    target = tmp_path / "policies" / policy_key(settings)
    with ThreadPoolExecutor(1) as other:
        with locked(target.with_name(f".{target.name}.lock"), 0, StackError("")):
            wanted = other.submit(policy.prepare_policy, settings, said.append)
            deadline = time.monotonic() + 30
            while not said and time.monotonic() < deadline:
                time.sleep(0.02)
            target.mkdir()
        assert wanted.result(30) == target
    assert said == [f"another process is making {target}; waiting for it, for 3600 s at most"]


def test_a_kept_policy_follows_a_data_folder_that_was_moved_or_copied(tmp_path: Path) -> None:
    kept, given = tmp_path / "a" / "policies" / "5036", tmp_path / "mine" / "5036"
    kept.mkdir(parents=True)
    given.mkdir(parents=True)

    def found(folder: str, named: Path) -> Path:
        return policy.prepare_policy(_settings(tmp_path / folder, f"--policy.path={named}"), print)

    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert found("b", kept) == tmp_path / "b" / "policies" / "5036"
    assert found("b", given) == given  # not one that was kept, whatever its name
    assert found("c", kept) == kept  # not kept there
    (tmp_path / "a").rename(tmp_path / "moved")
    assert found("moved", kept) == tmp_path / "moved" / "policies" / "5036"


def test_nobody_waits_for_ever_for_a_policy_that_another_process_is_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_WAIT_S", 0)
    settings = _settings(tmp_path)
    lock = tmp_path / "policies" / f".{policy_key(settings)}.lock"
    with locked(lock, 0, StackError("")), pytest.raises(StackError, match="end it, and start again"):
        policy.prepare_policy(settings, print)


def test_a_dead_programs_reason_is_its_last_log_line(tmp_path: Path) -> None:
    log = tmp_path / "learner.log"
    log.write_text("started\nno such file: policy\n\n")
    dead = State("learner", "fatal", 0, 3, 2, log)
    answer = health.check(Settings(), dead)
    assert not answer.ok
    assert answer.reason == "fatal, exit status 2: no such file: policy"


def test_a_learner_that_has_finished_is_well(tmp_path: Path) -> None:
    finished = State("learner", "exited", 0, 3, 0, tmp_path / "log")
    assert health.check(Settings(), finished) == health.Health(True, "finished")


def test_a_service_that_has_left_no_address_is_not_well(tmp_path: Path) -> None:
    assert health.service(_settings(tmp_path), "curate") == health.Health(False, "has not come up yet")


def test_what_an_earlier_process_left_is_no_silence_of_one_that_still_starts(tmp_path: Path) -> None:
    settings, port = _settings(tmp_path), ports.free_port()
    file = settings.run.folder / "services" / "learner-learner.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"pid": os.getpid(), "host": ports.HOST, "port": port}))  # a pid that is used again
    silent = {
        pid: health.check(settings, State("learner", "running", pid, 30, 0, tmp_path / "log")).is_silent
        for pid in (os.getpid(), os.getpid() + 1)
    }
    assert silent == {os.getpid(): True, os.getpid() + 1: False}


def _fake_java(folder: Path, version: str) -> str:
    java = folder / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    java.chmod(0o755)
    return str(java)
