"""The rollout service as a process against a real broker: killed, cut off from Kafka, stopped."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

import pytest

from inference.outbox import Outbox
from infra.kafka import ensure_topics
from infra.stack.kafka import LocalKafka
from infra.stack.ports import free_port
from schemas.messages import Task
from schemas.settings import Kafka
from tests.conftest import ROOT
from tests.rollout_fakes import task
from tests.rollout_process import (
    GROUP_SIZE,
    INSTANCE,
    Service,
    assert_each_once,
    members,
    prepare_rollouts,
    received,
    send,
    send_tasks,
    tasks_of,
    until,
    usage,
)

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def agent_task(draw: int, command: list[str]) -> Task:
    """A group of episodes that are runs of `command`."""
    return task(
        draw,
        family="agents",
        index=draw,
        group_size=GROUP_SIZE,
        environment="external",
        options={"command": command},
    )


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen]]:
    """Starts one broker, again and again, on one port and one folder."""
    local = LocalKafka(ROOT / ".lagoon" / "kafka", tmp_path / "kafka" / "data", free_port(), free_port())
    running: list[subprocess.Popen] = []

    def up() -> subprocess.Popen:
        command = local.prepare()
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return running[-1]

    up.address = local.address  # type: ignore[attr-defined]
    yield up
    for process in running:
        process.kill()
        process.wait(10)


AGENT = """
import json, os, urllib.request
said = [{"role": "user", "content": "1+1"}]
for _ in range(2):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions")
    answer = json.load(urllib.request.urlopen(request, json.dumps({"messages": said, "max_tokens": 5}).encode()))
    said += [answer["choices"][0]["message"], {"role": "user", "content": "again"}]
print(json.loads(os.environ["LAGOON_TASK"])["index"] / 4)
"""

LATE = """
import sys, time
from pathlib import Path
Path(sys.argv[1], "begun").touch()
while not Path(sys.argv[1], "may_end").exists():
    time.sleep(0.1)
"""


def send_late(kafka: Kafka, folder: Path) -> Task:
    """Send a group of episodes that end once there is `may_end` in `folder`; returns when one of them has begun."""
    late = agent_task(50, [sys.executable, "-c", LATE + AGENT, str(folder)])
    send(kafka, [late])
    until((folder / "begun").exists)
    return late


def test_a_service_killed_at_any_point_loses_no_finished_episode_and_counts_none_twice(
    tmp_path: Path, kafka: Kafka, start: Callable[..., Service]
) -> None:
    settings = prepare_rollouts(tmp_path, kafka)
    points = ("after_episode", "after_pack", "after_send", "before_acknowledgement")
    draws = count()
    for point in points:
        service = start(settings, f"outbox.{point}=0.2")
        while not service.has_ended:  # a pack may hold all that ten tasks bring, and its one chance go by
            send_tasks(kafka, islice(draws, 10))
            time.sleep(1)
        assert service.process.returncode == -signal.SIGKILL
    final = range(1000, 1010)
    send_tasks(kafka, final)
    service = start(settings)
    last = {t.group_id for t in tasks_of(final)}
    until(lambda: {r.group_id for m in received(kafka) for r in m.rows} >= last)
    assert service.stop() == 0
    outbox = Outbox(settings.run.folder / "outbox" / INSTANCE, settings.rollout.outbox_bytes)
    assert_each_once(received(kafka), outbox)


def test_episodes_wait_for_kafka_and_are_sent_when_it_comes_back(
    tmp_path: Path, own_broker: Callable[[], subprocess.Popen], start: Callable[..., Service]
) -> None:
    broker = own_broker()
    kafka = Kafka(brokers=own_broker.address, partitions=2, timeout_s=2)  # type: ignore[attr-defined]
    ensure_topics(kafka.model_copy(update={"timeout_s": 60}), timeout_s=60)
    settings = prepare_rollouts(tmp_path, kafka, create=False)
    service = start(settings)
    until(lambda: service.health()[0])
    send_tasks(kafka, range(20))
    until(lambda: bool(received(kafka)))
    late = send_late(kafka, tmp_path)
    broker.kill()
    broker.wait(10)
    (tmp_path / "may_end").touch()
    until(lambda: "Kafka takes no episodes" in service.health()[1])
    own_broker()
    until(lambda: service.health()[0])
    send_tasks(kafka, range(100, 105))
    wanted = {t.group_id for t in [late, *tasks_of([*range(20), *range(100, 105)])]}
    until(lambda: {g for g, n in members(kafka).items() if n >= GROUP_SIZE} == wanted)
    assert service.stop() == 0
    outbox = Outbox(settings.run.folder / "outbox" / INSTANCE, settings.rollout.outbox_bytes)
    assert_each_once(received(kafka), outbox)
    assert outbox.num_trajectories == 26 * GROUP_SIZE


def test_a_stopped_service_sends_what_is_finished_and_fails_what_is_not(
    tmp_path: Path, kafka: Kafka, start: Callable[..., Service]
) -> None:
    settings = prepare_rollouts(tmp_path, kafka, drain_s=0.01)
    send_tasks(kafka, range(30))
    service = start(settings)
    until(lambda: bool(received(kafka)))
    late = send_late(kafka, tmp_path)
    assert service.stop() == 0
    outbox = Outbox(settings.run.folder / "outbox" / INSTANCE, settings.rollout.outbox_bytes)
    messages = received(kafka)
    assert_each_once(messages, outbox)
    told = usage(kafka)[-1]
    assert (told.outbox, told.produced_trajectories) == (outbox.id, outbox.num_trajectories)
    assert (told.produced_tokens, told.weight_version) == (outbox.num_tokens, 1)
    stopped = [r for m in messages for r in m.rows if r.stop_reason == "shutdown"]
    assert late.group_id in {r.group_id for r in stopped}
    assert all(r.reward is None for r in stopped)


def test_agent_programs_are_groups_and_rows_like_any_other_episodes(
    tmp_path: Path, kafka: Kafka, start: Callable[..., Service]
) -> None:
    settings = prepare_rollouts(tmp_path, kafka)
    tasks = [agent_task(i, [sys.executable, "-c", AGENT]) for i in range(3)]
    send(kafka, tasks)
    service = start(settings)
    until(lambda: members(kafka) == {t.group_id: GROUP_SIZE for t in tasks})
    assert service.stop() == 0
    messages = received(kafka)
    assert_each_once(messages, Outbox(settings.run.folder / "outbox" / INSTANCE, settings.rollout.outbox_bytes))
    for row in (r for m in messages for r in m.rows):
        assert (row.status, row.reward, row.error, row.rewards) == ("completed", int(row.task_id[-1]) / 4, None, ())
        assert [m["content"] for m in row.messages if m["role"] == "user"] == ["1+1", "again"]
        assert row.num_generated_tokens == sum(row.action_mask) == sum(t.action_end - t.action_start for t in row.turns)
        assert len(row.turns) == 2
