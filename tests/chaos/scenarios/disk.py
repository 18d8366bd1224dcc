"""A full disk under the lake, a recovery store, the checkpoints and an outbox: each fills up and gets room again."""

import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from infra.lake import Lake
from infra.sql import connect
from schemas.settings import Kafka
from tests.chaos.processes import wait
from tests.chaos.table import Row
from tests.conftest import running_broker
from tests.integration.test_exactly_once import COPY, Run
from tests.integration.test_learner import BATCH, LIMIT_S, begin, prepare
from tests.rollout_process import GROUP_SIZE, Service, prepare_rollouts, received, send_tasks
from tests.small_disk import SmallDisk, mounted
from trainers.checkpoint import MANIFEST

MB = 1024 * 1024
STEPS = 30


def run(rounds: int, folder: Path) -> list[Row]:
    """A round fills each disk once. Where no disk can be mounted nothing is done, and a line says so."""
    try:
        with mounted(folder / "try", MB):
            pass
    except PermissionError as error:
        print(f"  disk: left out, no disk can be mounted here ({error}); try `unshare -rm`", flush=True)
        return []
    rows: list[Row] = []
    with running_broker(folder) as address:
        for number in range(rounds):
            for name, torment in SCENES.items():
                kafka = Kafka(brokers=address, topic_prefix=f"{name}{number}.", partitions=4)
                place = folder / f"{name}-{number}"
                place.mkdir()
                rows.append(torment(kafka, place))
    return rows


def _flow(kafka: Kafka, folder: Path, part: str) -> Row:
    row = Row(f"disk of the {part}")
    with mounted(folder / "runs" / "default" / part, 4 * MB) as disk:
        found = Run(kafka, folder)
        process = found.start(COPY)
        found.send("trajectories", 40, partitions=4)
        wait(lambda: _rows(found).total() == 40, 120, "the first rows")
        disk.fill()
        found.send("trajectories", 40, partitions=4)
        _ends_with_1(process, folder / "log", disk)
        _recover(row, disk, lambda: _check(found.finish([*COPY, "--bounded"])[0] == 0, "the flow goes on"))
        rows = _rows(found)
        row.lost, row.duplicated = 80 - len(rows), rows.total() - len(rows)
    return row


def _lake(kafka: Kafka, folder: Path) -> Row:
    return _flow(kafka, folder, "lake")


def _recovery(kafka: Kafka, folder: Path) -> Row:
    return _flow(kafka, folder, "recovery")


def _checkpoints(kafka: Kafka, folder: Path) -> Row:
    row = Row("disk of the checkpoints")
    settings = prepare(folder, kafka, STEPS)
    with mounted(settings.run.folder / "checkpoints", 64 * MB) as disk:
        process = begin(folder)
        wait(lambda: any(disk.folder.glob(f"*/{MANIFEST}")), LIMIT_S, "the first checkpoint")
        disk.fill()
        _ends_with_1(process, folder / "learner.log", disk)
        _check(all((p / MANIFEST).exists() for p in disk.folder.glob("step-*")), "no half checkpoint is left")
        _recover(row, disk, lambda: _check(begin(folder).wait(LIMIT_S) == 0, "the learner goes on"))
    with connect(Lake.of(settings)) as lake:
        uses = Counter(name for (name,) in lake.sql("select trajectory_id from live_samples").fetchall())
    row.lost, row.duplicated = STEPS * BATCH - len(uses), uses.total() - len(uses)
    return row


def _outbox(kafka: Kafka, folder: Path) -> Row:
    row, settings = Row("disk of an outbox"), prepare_rollouts(folder, kafka)
    with mounted(settings.run.folder / "outbox", 4 * MB) as disk:
        service = Service(settings)
        try:
            wait(lambda: service.health()[0], 120, "the service")
            disk.fill()
            send_tasks(kafka, range(20))
            wait(lambda: "no tasks are pulled" in service.health()[1], 120, "back-pressure")
            _recover(row, disk, lambda: wait(lambda: _members(kafka).total() >= 20 * GROUP_SIZE, 120, "all episodes"))
            _check(service.stop() == 0, "the service ends well")
        finally:
            service.kill()
    members = _members(kafka)
    row.lost, row.duplicated = 20 * GROUP_SIZE - len(members), members.total() - len(members)
    return row


SCENES = {"lake": _lake, "recovery": _recovery, "checkpoints": _checkpoints, "outbox": _outbox}


def _ends_with_1(process: "subprocess.Popen[str] | subprocess.Popen[bytes]", log: Path, disk: SmallDisk) -> None:
    _check(process.wait(120) == 1, "the process ends with 1")
    text = log.read_text(errors="replace")
    _check(f"the disk that holds {disk.folder}" in text and "is full (" in text, f"{log} names the disk")


def _recover(row: Row, disk: SmallDisk, goes_on: Callable[[], None]) -> None:
    disk.make_room()
    began = time.monotonic()
    goes_on()
    row.kills += 1
    row.recoveries_s.append(time.monotonic() - began)


def _rows(found: Run) -> Counter[tuple]:
    return found.rows("dead_letters", "partition", "offset")


def _members(kafka: Kafka) -> Counter[str]:
    return Counter(r.trajectory_id for m in received(kafka) for r in m.rows)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"expected that {what}")
