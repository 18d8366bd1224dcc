"""Places in Kafka's log across the lives of a run."""

import pyarrow as pa

from flows.steps.lives import stamped
from schemas.settings import Run


def test_a_first_life_changes_nothing() -> None:
    batch = pa.RecordBatch.from_pydict({"topic": ["trajectories"]})
    assert stamped(batch, Run()) is batch


def test_a_place_names_the_life_of_its_log() -> None:
    columns = {"topic": ["trajectories", "control"], "replayed_from": ["trajectories/3/14", None], "offset": [20, 1]}
    found = stamped(pa.RecordBatch.from_pydict(columns), Run(life=1)).to_pydict()
    assert found["topic"] == ["trajectories@1", "control@1"]
    assert found["replayed_from"] == ["trajectories@1/3/14", None]
    assert found["offset"] == [20, 1]
