"""The maintenance process beside writers and readers that never pause: no row lost, doubled or delivered twice."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from infra.lake import Lake
from infra.tail import Tail
from schemas.settings import Settings, load
from tests.rows import row
from trainers.stream import ExperienceStream

ROOT = Path(__file__).parents[2]
NUM_COMMITS, NUM_WRITERS, LIMIT_S = 40, 2, 120


def _write(uri: str, number: int) -> None:
    """Commits of one row in each of two partitions, staged and committed apart, as the flows do."""
    lake = Lake(uri)
    for sequence in range(1, NUM_COMMITS + 1):
        rows = [_row(f"{number}/{sequence}/{bucket}", bucket) for bucket in range(2)]
        lake.append("experience", rows, f"writer-{number}", sequence)


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


def _start(settings: Settings) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LAGOON_SETTINGS": str(settings.run.folder / "settings.json")}
    return subprocess.Popen([sys.executable, "-m", "infra.maintain"], env=environment)


@pytest.mark.slow
def test_a_writer_and_a_tail_notice_nothing_of_maintenance_even_when_it_is_killed(tmp_path: Path) -> None:
    overrides = ["--maintenance.every_s=0.05", "--maintenance.min_files=2", "--maintenance.vacuum_every_s=0.05"]
    settings = load(overrides=[f"--run.data_dir={tmp_path}", "--loop.batch_size=16", *overrides])
    settings.save(settings.run.folder / "settings.json")
    lake = Lake.of(settings)
    lake.ensure()
    stream, tail = ExperienceStream(lake, settings), Tail(lake, "experience", columns=["trajectory_id"])
    upkeep = _start(settings)
    writers = [
        multiprocessing.get_context("spawn").Process(target=_write, args=(lake.uri, number))
        for number in range(NUM_WRITERS)
    ]
    for writer in writers:
        writer.start()
    seen: Counter[str] = Counter()
    expected = {f"{n}/{s}/{b}" for n in range(NUM_WRITERS) for s in range(1, NUM_COMMITS + 1) for b in range(2)}
    deadline, kills = time.monotonic() + LIMIT_S, 0
    while (len(seen), kills) < (len(expected), 2) and time.monotonic() < deadline:
        seen.update(name for _, rows in tail.poll() for name in rows["trajectory_id"].to_pylist())
        stream.poll(1)
        if kills < 2 and len(seen) > len(expected) * (kills + 1) / 3:
            upkeep.kill()
            upkeep.wait()
            upkeep, kills = _start(settings), kills + 1
        time.sleep(0.02)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    merged = _wait_for_merge(lake, deadline)
    upkeep.send_signal(signal.SIGTERM)
    assert upkeep.wait(30) == 0
    assert (seen, kills) == (Counter(dict.fromkeys(expected, 1)), 2)
    assert tail.poll() == []
    table = lake.table("experience")
    table.update_incremental()
    assert sorted(table.to_pyarrow_table(columns=["trajectory_id"])["trajectory_id"].to_pylist()) == sorted(expected)
    assert merged
    resumed = ExperienceStream(lake, settings, stream.cursor())
    assert (resumed.poll(1), resumed.num_available) == (0, len(expected))


def _wait_for_merge(lake: Lake, deadline: float) -> bool:
    """Whether each of the two partitions comes down to at most two files."""
    while time.monotonic() < deadline:
        table = lake.table("experience")
        table.update_incremental()
        if len(table.file_uris()) <= 4:
            return True
        time.sleep(0.05)
    return False
