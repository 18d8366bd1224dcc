"""The short form of `make chaos`: one round of each scenario, judged by records that Lagoon had no hand in."""

import random
from pathlib import Path

import pytest

from tests.chaos.brokers import three_brokers
from tests.chaos.making import settings
from tests.chaos.scenarios import brokers, curate, loop
from tests.chaos.stream import Stream
from tests.chaos.table import passed, render

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


@pytest.mark.timeout(1200)
def test_every_trajectory_comes_to_its_fate_though_producer_and_workers_die(broker: str, tmp_path: Path) -> None:
    random.seed(1)
    stream = Stream(settings(tmp_path, broker, sink_partitions=curate.PROCESSES), tmp_path, curate.PROCESSES)
    rows = curate.torment(stream, 1)
    assert passed(rows), render(rows)
    assert [row.kills for row in rows] == [8, 5]


@pytest.mark.timeout(1800)
def test_the_loop_survives_a_kill_of_each_process_and_the_books_balance(tmp_path: Path, demo_policy: Path) -> None:
    random.seed(2)
    running, rows = loop.torment(1, tmp_path, [f"--policy.path={demo_policy}"])
    assert passed(rows), render(rows)
    assert {row.victim for row in rows if row.kills} == {*loop.VICTIMS}
    summary = running.summary()
    assert all(book["balanced"] and not book["in_flight"] for book in summary["conservation"].values()), summary
    assert summary["work"]["balanced"], summary
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"], summary
    assert all(check["passed"] for check in summary["checks"].values()), summary["checks"]


@pytest.mark.timeout(1200)
def test_with_three_brokers_one_may_die_and_nothing_is_lost(tmp_path: Path) -> None:
    random.seed(3)
    with three_brokers(tmp_path) as cluster:
        rows = brokers.torment(cluster, tmp_path, [brokers.kill])
    assert passed(rows), render(rows)
    assert [row.kills for row in rows] == [1]
