"""A learner and a dispatcher that stand still under a real supervisor: noticed, named, killed, and gone on from."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.kafka import Producer
from infra.lake import Lake
from infra.stack import health, programs
from infra.stack.supervise import State, Supervisor
from schemas.settings import Kafka, Settings
from schemas.topics import BUFFER
from tests.integration.test_dispatch_kafka import Tasks, closing, dispatches
from tests.integration.test_hung_evaluator import until, with_tasks
from tests.integration.test_learner import check_each_row_was_trained_once, prepare, put_rows, steps_done

STEPS, READY = 6, 4
"""Steps of the run, and those that there are rows for before the learner hangs: it must not have finished by then."""

HUNG = ("learner", "dispatch")


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path / "data")
    yield made
    made.shutdown(60)


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_learner_and_a_dispatcher_that_hang_are_named_killed_and_gone_on_from_with_nothing_lost(
    tmp_path: Path, kafka: Kafka, supervisor: Supervisor
) -> None:
    settings = _settings(tmp_path, kafka)
    supervisor.start([programs.service(settings, name) for name in (*HUNG, "warden")])
    tasks = Tasks(kafka)
    until(lambda: steps_done(settings) == READY and bool(tasks.read()), "steps and tasks")
    before = {name: _state(supervisor, name).pid for name in HUNG}
    for pid in before.values():
        os.kill(pid, signal.SIGSTOP)
    for name, pid in before.items():
        reason = f"{name}: process {pid} does not answer; after 5 s it is killed and started again"
        until(lambda reason=reason: reason in health.service(settings, "warden").reason, "word of the hung process")
    put_rows(settings, tmp_path, range(READY, STEPS))
    until(lambda: _state(supervisor, "learner").is_finished, "end of the run")
    check_each_row_was_trained_once(settings, STEPS)

    assert _state(supervisor, "dispatch").pid != before["dispatch"]
    num_dealt = len(tasks.read())
    producer = Producer(kafka, "test")
    producer.send(BUFFER.name, "s000", closing(tasks.tasks))
    producer.close()
    until(lambda: len(tasks.read()) > num_dealt, "further tasks")
    supervisor.stop(["dispatch"], 60)
    opened = [row["group_id"] for row in dispatches(Lake.of(settings))]
    assert len(opened) == len(set(opened))
    assert {task.group_id for task in tasks.read()} <= set(opened)


def _settings(folder: Path, kafka: Kafka) -> Settings:
    values = with_tasks(prepare(folder, kafka, READY)).model_dump()
    values["stack"]["hung_timeout_s"], values["learner"]["num_train_steps"] = 5, STEPS
    settings = Settings.model_validate(values)
    settings.save(settings.run.folder / "settings.json")
    return settings


def _state(supervisor: Supervisor, name: str) -> State:
    return next(state for state in supervisor.states() if state.program == name)
