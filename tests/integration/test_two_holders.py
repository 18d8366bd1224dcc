"""Two lives of one flow on one lake: the second is refused while the first lives; who lost its lease writes nothing."""

import shutil
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.cluster import ADDRESSES, PROCESS_ID
from infra.stack.ports import free_port
from schemas.settings import Settings
from tests.integration.test_exactly_once import COPY, LIMIT_S, Run, run, wait_until

__all__ = ["run"]

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


class Machine(Run):
    """Another machine: a copy of a run's folder, recovery store included, on the run's lake."""

    def __init__(self, original: Run, folder: Path) -> None:
        self.folder, self.lake, self.producer = folder, original.lake, original.producer
        shutil.copytree(original.settings.run.folder / "recovery", self._run_folder / "recovery")
        sections = {"run": {"data_dir": str(folder)}, "kafka": original.settings.kafka, "curate": {"epoch_s": 0.2}}
        self.settings = Settings.model_validate(sections | {"lake": {"uri": original.settings.lake_uri}})
        self.settings.save(folder / "settings.json")

    @property
    def _run_folder(self) -> Path:
        return self.folder / "runs" / "default"


@contextmanager
def alive(*processes: subprocess.Popen[str]) -> Generator[None]:
    """Processes that are dead at the end, stopped or not."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def is_stopped(process: subprocess.Popen[str]) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def offsets(run: Run) -> set[tuple[int, int]]:
    return {
        (p, o) for topic, p, o in run.rows("dead_letters", "topic", "partition", "offset") if topic == "trajectories"
    }


def test_a_second_flow_on_the_lake_is_refused_by_name_whatever_its_machine(run: Run, tmp_path: Path) -> None:
    first = run.start(COPY)
    with alive(first):
        run.send("trajectories", 8, partitions=4)
        wait_until(lambda: len(offsets(run)) == 8)
        for place in (run, Machine(run, tmp_path / "other")):
            code, log = place.finish(COPY)
            assert code == 1
            assert "another process holds the lease copy" in log
            assert f"process {first.pid}" in log
        assert first.poll() is None


def test_a_recovery_store_that_is_older_than_the_lake_is_refused(run: Run, tmp_path: Path) -> None:
    run.send("trajectories", 8, partitions=4)
    assert run.finish([*COPY, "--bounded"])[0] == 0
    old = Machine(run, tmp_path / "other")
    for _ in range(2):
        run.send("trajectories", 8, partitions=4)
        assert run.finish([*COPY, "--bounded"])[0] == 0
    code, log = old.finish([*COPY, "--bounded"])
    assert code == 1
    assert "is an older copy" in log
    assert set(run.rows("dead_letters", "partition", "offset").values()) == {1}


@pytest.mark.parametrize(("point", "elsewhere"), [("", False), ("sink.before_commit", True)])
def test_one_that_wakes_up_after_a_take_over_commits_nothing_and_says_why(
    run: Run, tmp_path: Path, point: str, elsewhere: bool
) -> None:
    sent = 40
    first = run.start(COPY, LAGOON_FAILPOINTS=f"stop:{point}=1" if point else "")
    with alive(first):
        run.send("trajectories", sent, partitions=4)
        if point:
            wait_until(lambda: is_stopped(first))
        else:
            wait_until(lambda: bool(offsets(run)))
            first.send_signal(signal.SIGSTOP)
        place = Machine(run, tmp_path / "other") if elsewhere else run
        run.send("trajectories", sent, partitions=4)
        log = run.folder / "log"
        log.rename(run.folder / "log of the first")
        second = place.start(COPY)
        with alive(second):
            wait_until(lambda: len(offsets(run)) == 2 * sent)
            first.send_signal(signal.SIGCONT)
            run.send("trajectories", sent, partitions=4)
            assert first.wait(LIMIT_S) == 1
            wait_until(lambda: len(offsets(run)) == 3 * sent)
            second.terminate()
            assert second.wait(LIMIT_S) == 0
    assert "lost its lease" in (run.folder / "log of the first").read_text()
    assert set(run.rows("dead_letters", "topic", "partition", "offset", "error").values()) == {1}


def test_a_cluster_holds_one_lease_and_its_last_process_keeps_it(run: Run) -> None:
    def cluster() -> list[subprocess.Popen[str]]:
        addresses = ";".join(f"127.0.0.1:{free_port()}" for _ in range(2))
        return [run.start(COPY, **{ADDRESSES: addresses, PROCESS_ID: str(n)}) for n in range(2)]

    first = cluster()
    with alive(*first):
        run.send("trajectories", 40, partitions=4)
        wait_until(lambda: len(offsets(run)) == 40)
        first[1].send_signal(signal.SIGSTOP)
        first[0].kill()
        first[0].wait()
        run.send("trajectories", 40, partitions=4)
        second = cluster()
        with alive(*second):
            wait_until(lambda: len(offsets(run)) == 80)
            first[1].send_signal(signal.SIGCONT)
            assert first[1].wait(LIMIT_S) != 0
            for process in second:
                process.terminate()
            assert [process.wait(LIMIT_S) for process in second] == [0, 0]
    assert set(run.rows("dead_letters", "topic", "partition", "offset", "error").values()) == {1}
