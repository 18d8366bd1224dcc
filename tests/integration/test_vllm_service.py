"""A rollout service whose vLLM server is killed: nothing that was finished is lost, and it goes on by itself."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from inference.outbox import Outbox
from schemas.names import ErrorKind, Status
from schemas.settings import Kafka, Settings
from tests.integration.test_hung_evaluator import evaluating
from tests.rollout_process import (
    GROUP_SIZE,
    INSTANCE,
    Service,
    assert_each_once,
    members,
    prepare_rollouts,
    received,
    send_tasks,
    tasks_of,
)
from tests.vllm_server import START_S, needs_vllm

pytestmark = [pytest.mark.kafka, pytest.mark.slow, needs_vllm, pytest.mark.timeout(1500)]


def test_a_killed_server_costs_the_episodes_in_flight_and_nothing_else(
    tmp_path: Path, kafka: Kafka, start: Callable[..., Service]
) -> None:
    settings = _on_vllm(prepare_rollouts(tmp_path, kafka))
    service = start(settings)
    until(lambda: service.health()[0], service)
    send_tasks(kafka, range(20))
    until(lambda: bool(received(kafka)), service)
    server = _server_of(service)
    os.kill(server, signal.SIGKILL)
    until(lambda: not service.health()[0], service)
    until(lambda: service.health()[0], service)
    assert _server_of(service) != server
    send_tasks(kafka, range(100, 105))
    wanted = {t.group_id for t in tasks_of([*range(20), *range(100, 105)])}
    until(lambda: {g for g, n in members(kafka).items() if n >= GROUP_SIZE} == wanted, service)
    assert service.stop() == 0

    messages = received(kafka)
    assert_each_once(messages, Outbox(settings.run.folder / "outbox" / INSTANCE, settings.rollout.outbox_bytes))
    rows = [r for m in messages for r in m.rows]
    failed = [r for r in rows if r.status == Status.FAILED]
    assert {(r.error_kind, r.reward) for r in failed} <= {(ErrorKind.ENGINE, None)}
    assert all(r.num_prompt_tokens > 0 for r in failed)
    late = {t.group_id for t in tasks_of(range(100, 105))}
    assert not [r for r in failed if r.group_id in late]
    assert {s.version for r in rows for s in r.weight_version_spans} == {1}


def test_a_killed_service_takes_its_server_along(tmp_path: Path, kafka: Kafka, start: Callable[..., Service]) -> None:
    service = start(_on_vllm(prepare_rollouts(tmp_path, kafka)))
    until(lambda: bool(_servers_below(service.process.pid)), service)
    everything = _descendants(service.process.pid)
    service.kill()
    until(lambda: not [pid for pid in everything if _command(pid)], None)


def test_a_killed_evaluator_takes_the_servers_of_both_kinds_along(tmp_path: Path, kafka: Kafka) -> None:
    values = prepare_rollouts(tmp_path, kafka).model_dump()
    values["evaluator"] |= {"engine": "vllm", "full_every": 1}
    values["families"] = [{"name": "add", "num_tasks": 10}]
    saved = tmp_path / "settings.json"
    Settings.model_validate(values).save(saved)
    with evaluating(saved, tmp_path) as evaluator:
        until(lambda: len(_servers_below(evaluator.pid)) == 2, None)
        everything = _descendants(evaluator.pid)
        ports = {_command(pid).partition(b"--port\0")[2].partition(b"\0")[0] for pid in everything}
        assert len(ports - {b""}) == 2
        evaluator.kill()
        evaluator.wait(10)
        until(lambda: not [pid for pid in everything if _command(pid)], None)


def _on_vllm(settings: Settings) -> Settings:
    values = settings.model_dump()
    values["rollout"]["engine"], values["rollout"]["episode_timeout_s"] = "vllm", 120
    values["vllm"]["start_timeout_s"] = START_S
    return Settings.model_validate(values)


def _server_of(service: Service) -> int:
    """Process id of its vLLM API server."""
    (server,) = _servers_below(service.process.pid)
    return server


def _servers_below(pid: int) -> list[int]:
    """Process ids of the vLLM API servers of process `pid`: children of their guards, which are its children."""
    return [p for guard in _children(pid) for p in _children(guard) if b"api_server" in _command(p)]


def _descendants(pid: int) -> list[int]:
    below = _children(pid)
    return below + [d for child in below for d in _descendants(child)]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # of a thread that has ended meanwhile
            found += map(int, listing.read_text().split())
    return found


def _command(pid: int) -> bytes:
    """The command line of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def until(condition: Callable[[], bool], service: Service | None) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert service is None or not service.has_ended, "the service has ended"
        assert time.monotonic() < deadline, f"not within {START_S} s; health: {service and service.health()}"
        time.sleep(0.2)
