"""The chaos suite can fail: with a fault planted in the product, its judges find it and name it.

That they find nothing where there is nothing is `test_chaos`.
"""

import json
from pathlib import Path

import pytest

from infra.lake import Lake
from schemas.names import Event
from schemas.settings import Kafka, load
from tests.chaos.faults import planted
from tests.chaos.judge import Verdict, judge_learner
from tests.chaos.making import settings
from tests.chaos.processes import Fleet, wait
from tests.chaos.stream import Stream
from tests.experience import leave
from tests.integration.test_learner import BATCH, ROOT, prepare

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

ENOUGH = 120


def curated(kafka: Kafka, folder: Path, fault: str) -> Verdict:
    """The verdict on a short stream through a flow with `fault`; nothing is killed."""
    found = settings(folder, kafka.brokers, kafka={"topic_prefix": kafka.topic_prefix})
    stream = Stream(found, folder, environment=planted(fault), quiet_s=8)
    try:
        stream.producer.live()
        stream.curate.live()
        wait(lambda: stream.made() >= ENOUGH, 120, f"{ENOUGH} trajectories")
        return stream.settle()
    finally:
        stream.close()


def test_a_sink_that_commits_twice_is_named(kafka: Kafka, tmp_path: Path) -> None:
    verdict = curated(kafka, tmp_path, "commits_twice")
    assert (verdict.lost, verdict.duplicated > ENOUGH) == (0, True), verdict.shown()
    assert any(f.startswith("duplicated: outcome of trajectory") and "2 found, 1 expected" in f for f in verdict.faults)
    assert any(f.startswith("duplicated: closing of group") for f in verdict.faults)
    assert any("view `conservation` does not balance in trajectories" in f for f in verdict.faults)


def test_a_dropped_batch_is_named(kafka: Kafka, tmp_path: Path) -> None:
    verdict = curated(kafka, tmp_path, "drops_a_batch")
    assert verdict.lost > 0
    assert verdict.duplicated == 0
    assert any(f.startswith("lost: outcome of trajectory") and "0 found, 1 expected" in f for f in verdict.faults)
    assert any(f.startswith("unexplained: experience of") and "1 found, 0 expected" in f for f in verdict.faults)
    assert any("view `conservation` does not balance in tokens" in f for f in verdict.faults)


def test_training_above_the_staleness_bound_is_named(kafka: Kafka, tmp_path: Path) -> None:
    steps = 8
    made = prepare(tmp_path, kafka, steps)
    names = [f"t{number:04d}" for number in range(steps * BATCH)]
    leave(Lake.of(made), names, Event.ADMITTED, steps + 1)
    config = tmp_path / "settings.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"loop": made.loop.model_dump() | {"max_staleness": 1}})
    )
    script = [str(ROOT / "trainers" / "learn.py"), "--config", str(config)]
    learner = Fleet(script, tmp_path / "learner.log", environment=planted("trains_stale") | {"DS_ACCELERATOR": "cpu"})
    learner.start()
    try:
        wait(lambda: not learner.is_whole, 240, "the learner to finish")
        learner.stop()
    finally:
        learner.kill()
    verdict = judge_learner(load([config]), dict.fromkeys(names, 1), steps)
    # every third step is published: steps 1-3 start from version 1, 4-6 from 2, 7 and 8 from 3, which is 2 above
    late = [f for f in verdict.faults if f.startswith("unexplained: trained above the staleness bound: step ")]
    assert {fault.split("step ")[1].split(",")[0] for fault in late} == {"7", "8"}
    assert len(late) == len(verdict.faults) == 2 * BATCH
    assert late[0].endswith(": 2 versions old, bound 1")
