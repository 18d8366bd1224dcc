"""A curate process that stands still past its lease, a second one that takes over, and the first one's awakening.

Each time it is stopped where it hurts: before a commit, after staging, after a commit, or anywhere.
"""

import random
import signal
import subprocess
import time
from pathlib import Path

from tests.chaos.making import settings
from tests.chaos.processes import Fleet, wait
from tests.chaos.stream import RECOVERY_S, Stream
from tests.chaos.table import Row
from tests.conftest import running_broker

END_S = 60.0
POINTS = ("sink.after_stage", "sink.before_commit", "sink.after_commit", "")


def run(rounds: int, folder: Path) -> list[Row]:
    """A round stops a process at each point."""
    with running_broker(folder) as address:
        return torment(Stream(settings(folder, address), folder), folder, rounds)


def torment(stream: Stream, folder: Path, rounds: int) -> list[Row]:
    """Recovery counts from the moment of standing still, so it holds the whole lease."""
    row, zombies = Row("curate, stopped past its lease"), list[subprocess.Popen[bytes]]()
    config = ["--config", str(folder / "settings.json")]
    try:
        stream.producer.live()
        for point in POINTS * rounds:
            first = Fleet(["-m", "flows.curate", *config], folder / "curate.log")
            before = stream.rows()
            first.start(f"stop:{point}=0.2" if point else "")
            zombies += first.processes
            if not point:
                wait(lambda before=before: stream.rows() > before, RECOVERY_S, "curate to go on")
            _stand_still(zombies[-1], point)
            _take_over(stream, row)
            assert _wake(zombies[-1]) == 1, "a process that had lost its lease did not end with status 1"
            stream.curate.fleet.stop()
        stream.curate.live()
        verdict = stream.settle()
    finally:
        stream.close()
        for process in zombies:
            process.kill()
    print(verdict.shown() or f"  zombies: {stream.made()} trajectories made, each came to its fate", flush=True)
    return [row.add(verdict)]


def _stand_still(process: subprocess.Popen[bytes], point: str) -> None:
    if not point:
        time.sleep(random.uniform(0, 2))
        process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    wait(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", RECOVERY_S, f"{point} to stop curate")


def _wake(process: subprocess.Popen[bytes]) -> int | None:
    """The status with which it ends; several sinks pass a fail-point, and each may stop it again."""
    deadline = time.monotonic() + END_S
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
    return process.poll()


def _take_over(stream: Stream, row: Row) -> None:
    began, before = time.monotonic(), stream.rows()
    row.kills += 1
    stream.curate.fleet.start()
    wait(lambda: stream.rows() > before, RECOVERY_S, "a second process to take over")
    row.recoveries_s.append(time.monotonic() - began)
