"""The synchronous twin for real: every process, the real broker, and a lake that is as strict as the mode says."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infra import sql
from infra.cli.compare import SYNC
from infra.lake import Lake
from infra.stack.programs import ROOT
from schemas.settings import Kafka, load

STEPS, BATCH, GROUP = 3, 16, 8
SMALL = f"""
[loop]
batch_size = {BATCH}
group_size = {GROUP}

[dispatch]
lease_s = 90

[curate]
group_timeout_s = 40

[rollout]
episode_timeout_s = 30

[learner]
num_train_steps = {STEPS}

[policy]
warm_start_steps = 60

[evaluator]
samples_per_family = 4

[tracking]
enabled = false

[maintenance]
enabled = false

[stack]
start_timeout_s = 300

[[families]]
name = "add"

[[families]]
name = "larger"
"""


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_version_is_trained_once_on_a_batch_that_it_sampled_itself_and_the_books_balance(
    kafka: Kafka, tmp_path: Path
) -> None:
    lake = _demo(tmp_path, kafka)
    books = "select bool_and(balanced and in_flight = 0) from conservation"
    assert _rows(lake, f"select ({books}), (select balanced and open = 0 from work)") == [(True, True)]
    # every step: one whole batch, all of it sampled by the version that the step began with and by no other
    found = "select step, learner_version, count(*), min(min_weight_version), max(max_weight_version), max(staleness)"
    steps = _rows(lake, f"{found} from step_lineage group by all order by step")
    assert steps == [(n, n, BATCH, n, n, 0) for n in range(1, STEPS + 1)]
    published = _rows(lake, "select step, published_version from live_steps order by step")
    assert published == [(n, n + 1) for n in range(1, STEPS + 1)]
    # what a step did not need was not opened: a batch, and one group for each that had no signal or lost a member
    short = "select count(*) from groups where at_version = {0} and (zero_variance or num_rewards < group_size)"
    opened = "select count(*) from dispatches where event = 'opened' and min_weight_version = {0}"
    for version in range(1, STEPS + 1):
        needed = BATCH // GROUP + _rows(lake, short.format(version))[0][0]
        assert _rows(lake, opened.format(version))[0][0] <= needed
    # nothing was opened for the weights of the last step
    assert _rows(lake, f"select count(*) from dispatches where min_weight_version > {STEPS}") == [(0,)]
    # and nothing was opened before the weights were there that are to sample it
    early = """
        select count(*) from dispatches d
        join live_steps s on s.published_version = d.min_weight_version
        where d.event = 'opened' and d."at" < s.finished_at"""
    assert _rows(lake, early) == [(0,)]


def _demo(folder: Path, kafka: Kafka) -> Lake:
    """The lake of a demo that has ended well."""
    small = folder / "small.toml"
    small.write_text(SMALL)
    settings = [
        f"--run.data_dir={folder}",
        f"--kafka.brokers={kafka.brokers}",
        f"--kafka.topic_prefix={kafka.topic_prefix}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "infra.cli.main", "demo", "--config", small, "--config", SYNC, *settings],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return Lake.of(load([folder / "current" / "settings.json"]))


def _rows(lake: Lake, query: str) -> Sequence[Any]:
    with sql.connect(lake) as connection:
        return connection.execute(query).fetchall()
