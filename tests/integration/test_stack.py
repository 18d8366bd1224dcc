"""The local stack, really started and really killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from infra.stack import health, ports
from infra.stack.bring_up import take_down
from infra.stack.policy import prepare_policy
from infra.stack.programs import ROOT, Program
from infra.stack.supervise import State, Supervisor, marked
from schemas.errors import StackError
from schemas.settings import Kafka, load

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """A supervisor of an empty data folder; it and its programs end with the test."""
    made = Supervisor(tmp_path)
    yield made
    made.shutdown(30)


@pytest.mark.kafka
def test_the_broker_keeps_what_it_is_sent(kafka: Kafka) -> None:
    _send(kafka.brokers, kafka.topic("greetings"), b"hello")
    assert _first(kafka.brokers, kafka.topic("greetings")) == b"hello"


def test_a_killed_program_comes_back(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start([Program("sleeper", SLEEP, tmp_path / "log")])
    first = _pid(supervisor, "sleeper")
    os.kill(first, signal.SIGKILL)
    _until(lambda: _state(supervisor, "sleeper").pid not in (0, first))
    assert _state(supervisor, "sleeper").is_up


def test_a_program_that_ends_well_stays_ended(supervisor: Supervisor, tmp_path: Path) -> None:
    ends = [sys.executable, "-c", "import time; time.sleep(5.5)"]  # longer than it may take to count as started
    supervisor.start([Program("learner", ends, tmp_path / "log")])
    _until(lambda: _state(supervisor, "learner").name == "exited")
    assert _state(supervisor, "learner").exit_status == 0


def test_starting_again_leaves_what_runs_alone_and_restarts_what_changed(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    same = Program("same", SLEEP, tmp_path / "same.log")
    supervisor.start([same, Program("other", SLEEP, tmp_path / "other.log")])
    before = {name: _pid(supervisor, name) for name in ("same", "other")}
    supervisor.start([same, Program("other", SLEEP, tmp_path / "other.log", {"SETTING": "new"})])
    _until(lambda: _state(supervisor, "other").pid not in (0, before["other"]))
    assert _state(supervisor, "same").pid == before["same"]


def test_stopping_ends_children_too(supervisor: Supervisor, tmp_path: Path) -> None:
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    supervisor.start([Program("parent", [sys.executable, "-c", parent], tmp_path / "log")])
    _until(lambda: len(marked(str(tmp_path))) == 2)
    supervisor.stop(["parent"], 30)
    _until(lambda: marked(str(tmp_path)) == [])


def test_a_killed_program_leaves_no_child_beside_its_successor(supervisor: Supervisor, tmp_path: Path) -> None:
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    command = [sys.executable, "-m", "infra.stack.succeed", sys.executable, "-c", parent]
    supervisor.start([Program("parent", command, tmp_path / "log", {"PYTHONPATH": str(ROOT)}), _sleeper(tmp_path)])
    first = _pid(supervisor, "parent")
    _until(lambda: len(marked(str(tmp_path), "parent")) == 2)
    (orphan,) = {*marked(str(tmp_path), "parent")} - {first}
    _until(lambda: len(marked(str(tmp_path), "sleeper")) == 1)
    others = marked(str(tmp_path), "sleeper")
    os.kill(first, signal.SIGKILL)
    _until(lambda: len(now := marked(str(tmp_path), "parent")) == 2 and not {first, orphan} & {*now})
    assert marked(str(tmp_path), "sleeper") == others  # not even killed and started again


def test_what_a_killed_supervisor_left_behind_is_ended_before_the_next_start(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    program = Program("sleeper", SLEEP, tmp_path / "log")
    supervisor.start([program])
    orphan = _pid(supervisor, "sleeper")
    _until(lambda: marked(str(tmp_path)) == [orphan])  # a child that has not begun its program carries no mark yet
    os.kill(int((supervisor.folder / "supervisord.pid").read_text()), signal.SIGKILL)
    _until(lambda: not supervisor.is_running())
    supervisor.start([program])
    assert _pid(supervisor, "sleeper") != orphan
    _until(lambda: marked(str(tmp_path)) == [_pid(supervisor, "sleeper")])


def test_what_was_started_is_shown_without_a_supervisor_too(supervisor: Supervisor, tmp_path: Path) -> None:
    settings = load([], [f"--run.data_dir={tmp_path}", "--kafka.brokers=127.0.0.1:1", "--tracking.enabled=false"])
    supervisor.start([_sleeper(tmp_path)])
    for end in (lambda: None, lambda: supervisor.shutdown(30)):
        end()
        found = health.parts(settings, supervisor.states(), supervisor.started())
        assert [(part.name, part.health.ok) for part in found] == [("kafka", False), ("sleeper", False)]
    assert [part.state for part in found] == ["remote", "stopped"]


def test_a_supervisor_that_is_asked_to_end_is_waited_for_by_every_command(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    deaf = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); print(1); time.sleep(600)"]
    program = Program("deaf", deaf, tmp_path / "log", stop_s=2)
    try:
        for command in (supervisor.launch, lambda: take_down(str(tmp_path), print)):
            supervisor.start([program])
            _until(lambda: (tmp_path / "log").read_text() != "")
            (tmp_path / "log").write_text("")
            os.kill(int((supervisor.folder / "supervisord.pid").read_text()), signal.SIGTERM)
            _until(lambda: not supervisor.is_running())
            assert supervisor.states() == []
            command()
            assert marked(str(tmp_path)) == []
    finally:
        supervisor.shutdown(30)


def test_a_policy_that_cannot_be_made_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    settings = load([], [f"--run.data_dir={tmp_path}"])
    with pytest.raises(StackError, match=r"inference\.demonstrate ended with 2: .*families"):
        prepare_policy(settings, print)
    assert [p.name for p in (tmp_path / "policies").iterdir() if p.suffix != ".lock"] == []


@pytest.mark.slow
def test_up_twice_down_and_up_again_keeps_address_and_data(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    try:
        assert _lagoon("up", "kafka", tmp_path) == 0
        address = f"{ports.HOST}:{ports.remembered(tmp_path, 'kafka')}"
        first = _state(supervisor, "kafka").pid
        _send(address, "kept", b"before")
        assert _lagoon("up", "kafka", tmp_path) == 0
        assert _state(supervisor, "kafka").pid == first
        assert _lagoon("down", tmp_path) == 0
        assert marked(str(tmp_path)) == []
        assert _lagoon("up", "kafka", tmp_path) == 0
        assert _first(address, "kept") == b"before"
        moved = ports.free_port()
        assert _lagoon("up", "kafka", f"--stack.kafka_port={moved}", tmp_path) == 0  # while it runs on another one
        _send(f"{ports.HOST}:{moved}", "moved", b"there")
    finally:
        supervisor.shutdown(60)


def _lagoon(*arguments: str | Path) -> int:
    *command, data_dir = arguments
    return subprocess.run(
        [sys.executable, "-m", "infra.cli.main", *map(str, command), f"--run.data_dir={data_dir}"],
        cwd=ROOT,
        check=False,
        timeout=200,
    ).returncode


def _send(brokers: str, topic: str, value: bytes) -> None:
    admin = AdminClient({"bootstrap.servers": brokers})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    producer = Producer({"bootstrap.servers": brokers})
    producer.produce(topic, value)
    assert producer.flush(30) == 0


def _first(brokers: str, topic: str) -> bytes | None:
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    deadline, message = time.monotonic() + 60, None
    while (message is None or message.error()) and time.monotonic() < deadline:  # a broker that has just come up
        message = consumer.poll(1)
    consumer.close()
    return message.value() if message else None


def _sleeper(folder: Path) -> Program:
    return Program("sleeper", SLEEP, folder / "log")


def _state(supervisor: Supervisor, name: str) -> State:
    return next(s for s in supervisor.states() if s.program == name)


def _pid(supervisor: Supervisor, name: str) -> int:
    _until(lambda: _state(supervisor, name).pid > 0)
    return _state(supervisor, name).pid


def _until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)
