"""The maintenance process beside writers and readers that never pause: no row lost, doubled or delivered twice."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from infra.lake import Lake
from infra.maintenance.compaction import open_table
from infra.tail import Tail
from schemas.settings import Settings, load
from tests.rows import row
from trainers.stream import ExperienceStream

ROOT = Path(__file__).parents[2]
NUM_WRITERS, LIMIT_S = 2, 120


def _write(uri: str, number: int, over: Event) -> None:
    """Commits of one row in each of two partitions, staged and committed apart, as the flows do, until `over`."""
    lake = Lake(uri)
    for sequence in count(1):
        rows = [_row(f"{number}/{sequence}/{bucket}", bucket) for bucket in range(2)]
        lake.append("experience", rows, f"writer-{number}", sequence)
        if over.is_set():
            return


def _row(name: str, bucket: int) -> dict:
    values = {"reward": 1.0, "group_reward_mean": 0.5, "group_reward_std": 0.5}
    return row(
        "experience",
        trajectory_id=name,
        group_id=name,
        version_bucket=bucket,
        min_weight_version=bucket,
        token_ids=[1, 2],
        action_mask=[False, True],
        behavior_logprobs=[0.0, -0.5],
        **values,
    )


@contextmanager
def _writing(uri: str) -> Generator[Callable[[], None]]:
    """Writers that commit until what is yielded is called, which returns once they have ended."""
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    writers = [context.Process(target=_write, args=(uri, number, over)) for number in range(NUM_WRITERS)]

    def end() -> None:
        over.set()
        for writer in writers:
            writer.join()
        assert [writer.exitcode for writer in writers] == [0, 0]

    for writer in writers:
        writer.start()
    try:
        yield end
    finally:
        over.set()


@contextmanager
def _maintaining(settings: Settings, lake: Lake, read: Callable[[], None]) -> Generator[subprocess.Popen]:
    """A maintenance process that has merged files while `read` was called again and again; killed at the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LAGOON_SETTINGS": str(settings.run.folder / "settings.json")}
    known = lake.version("experience")
    process = subprocess.Popen([sys.executable, "-m", "infra.maintain"], env=environment)
    try:
        _until(lambda: _has_merged(lake, known), read)
        yield process
    finally:
        process.kill()
        process.wait()


def _has_merged(lake: Lake, known: int) -> bool:
    """Whether files were merged after version `known`."""
    commits = open_table(lake, "experience").history()
    return any(commit["operation"] == "OPTIMIZE" and commit["version"] > known for commit in commits)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_writer_and_a_tail_notice_nothing_of_maintenance_even_when_it_is_killed(tmp_path: Path) -> None:
    overrides = ["--maintenance.every_s=0.05", "--maintenance.min_files=2", "--maintenance.vacuum_every_s=0.05"]
    settings = load(overrides=[f"--run.data_dir={tmp_path}", "--loop.batch_size=16", *overrides])
    settings.save(settings.run.folder / "settings.json")
    lake = Lake.of(settings)
    lake.ensure()
    stream, tail = ExperienceStream(lake, settings), Tail(lake, "experience", columns=["trajectory_id"])
    seen: Counter[str] = Counter()

    def read() -> None:
        seen.update(name for _, rows in tail.poll() for name in rows["trajectory_id"].to_pylist())
        stream.poll(1)

    with _writing(lake.uri) as end_writers:
        for _ in range(2):
            with _maintaining(settings, lake, read):
                pass  # and killed
        with _maintaining(settings, lake, read) as upkeep:
            end_writers()
            expected = _written(lake)
            _until(lambda: len(seen) >= len(expected), read)
            _until(lambda: len(open_table(lake, "experience").file_uris()) <= 4)  # two in each of two partitions
            upkeep.send_signal(signal.SIGTERM)
            assert upkeep.wait(LIMIT_S) == 0
    assert seen == Counter(expected)
    assert tail.poll() == []
    table = open_table(lake, "experience").to_pyarrow_table(columns=["trajectory_id"])
    assert sorted(table["trajectory_id"].to_pylist()) == sorted(expected)
    resumed = ExperienceStream(lake, settings, stream.cursor())
    resumed.poll(1)
    assert resumed.num_available == len(expected)


def _written(lake: Lake) -> list[str]:
    """The rows of all commits of the writers."""
    last = [lake.last_sequence("experience", f"writer-{n}") for n in range(NUM_WRITERS)]
    return [f"{n}/{s}/{b}" for n in range(NUM_WRITERS) for s in range(1, last[n] + 1) for b in range(2)]


def _until(condition: Callable[[], bool], step: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s"
        step()
        time.sleep(0.02)
