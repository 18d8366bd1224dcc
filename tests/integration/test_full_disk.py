"""A full disk under outbox, lake, recovery store and checkpoints: named, survived, and no row lost or twice."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from inference.outbox import Outbox
from inference.segments import SegmentLog
from schemas.errors import LagoonError
from schemas.settings import Kafka, Settings
from tests.integration.test_exactly_once import COPY, Run, wait_until
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
    until,
)
from tests.small_disk import small_disk
from trainers.checkpoint import Checkpoints, State, writing
from trainers.stream import Cursor

MB = 1024 * 1024


def test_a_record_that_finds_no_room_leaves_nothing_and_is_written_once_there_is_some(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with small_disk(request, tmp_path / "disk", MB) as disk:
        log = SegmentLog(disk.folder / "outbox", 64, lambda: b"header")
        list(log.recover())
        log.append(1, b"a" * 100)  # longer than a segment: the next record begins another file
        disk.fill()
        for _ in range(3):
            with pytest.raises(OSError, match=r"No space|bytes written"):
                log.append(1, b"b" * 8192)
        disk.make_room()
        log.append(1, b"c" * 8192)
        log.close()
        again = SegmentLog(disk.folder / "outbox", 64, lambda: b"header")
        assert [r.payload[:1] for r in again.recover() if r.kind == 1] == [b"a", b"c"]
        assert again.damage == []
        again.close()


def test_a_checkpoint_that_finds_no_room_is_removed_and_the_one_before_stays(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with small_disk(request, tmp_path / "disk", 2 * MB) as disk:
        checkpoints = Checkpoints(disk.folder / "checkpoints", 2, lambda: datetime.now(UTC))
        weights = torch.zeros(MB // 4)  # a megabyte

        def save(step: int) -> Path:
            folder = checkpoints.begin(step, 1)
            with writing(folder):
                torch.save(weights, folder / "rng-0.pt")
                checkpoints.complete(folder, State(step=step, weight_version=1), Cursor(num_consumed=step))
            return folder

        save(1)
        with pytest.raises(LagoonError, match=r"step-00000002-v00000001 is full \("):
            save(2)
        assert len(list((disk.folder / "checkpoints").iterdir())) == 1
        found, incomplete = checkpoints.newest()
        assert found is not None
        assert (found.state.step, found.cursor.num_consumed, incomplete) == (1, 1, [])
        assert torch.load(found.folder / "rng-0.pt").equal(weights)


@pytest.fixture
def service() -> Iterator[Callable[..., Service]]:
    """Starts one service, which is gone after the test."""
    started: list[Service] = []

    def start(settings: Settings) -> Service:
        started.append(Service(settings))
        return started[-1]

    yield start
    for one in started:
        if not one.has_ended:
            one.kill()


@pytest.mark.kafka
@pytest.mark.slow
def test_a_full_disk_under_the_outbox_stops_new_tasks_and_loses_no_finished_episode(
    request: pytest.FixtureRequest, tmp_path: Path, kafka: Kafka, service: Callable[..., Service]
) -> None:
    settings = prepare_rollouts(tmp_path, kafka)
    with small_disk(request, settings.run.folder / "outbox", 4 * MB) as disk:
        running = service(settings)
        until(lambda: running.health()[0])
        disk.fill()
        send_tasks(kafka, range(20))
        until(lambda: "no tasks are pulled" in running.health()[1])
        well, reason = running.health()
        assert not well
        assert f"the disk that holds {disk.folder / INSTANCE} is full" in reason
        send_tasks(kafka, range(100, 120))
        assert received(kafka) == []
        disk.make_room()
        wanted = {t.group_id for t in tasks_of([*range(20), *range(100, 120)])}
        until(lambda: {g for g, n in members(kafka).items() if n >= GROUP_SIZE} == wanted)
        until(lambda: running.health()[0])
        assert running.stop() == 0
        outbox = Outbox(disk.folder / INSTANCE, settings.rollout.outbox_bytes)
        assert_each_once(received(kafka), outbox)
        assert outbox.num_trajectories == 40 * GROUP_SIZE
        outbox.close()


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.parametrize("folder", ["lake", "recovery"])
def test_a_full_disk_ends_a_flow_with_its_name_and_after_a_restart_every_row_is_there_once(
    request: pytest.FixtureRequest, tmp_path: Path, kafka: Kafka, folder: str
) -> None:
    with small_disk(request, tmp_path / "runs" / "default" / folder, 4 * MB) as disk:
        run = Run(kafka, tmp_path)
        process = run.start(COPY)
        run.send("trajectories", 40, partitions=4)
        wait_until(lambda: run.rows("dead_letters", "topic").total() == 40)
        disk.fill()
        run.send("trajectories", 40, partitions=4)
        assert process.wait(120) == 1
        log = (tmp_path / "log").read_text()
        assert f"the disk that holds {disk.folder}" in log
        assert "is full (" in log
        assert "make room" in log
        disk.make_room()
        assert list(disk.folder.rglob("*.tmp")) == []
        code, log = run.finish([*COPY, "--bounded"])
        assert code == 0, log[-3000:]
        expected = {("trajectories", p, n, f"lane {p}"): 1 for p in range(4) for n in range(20)}
        assert run.rows("dead_letters", "topic", "partition", "offset", "error") == expected
