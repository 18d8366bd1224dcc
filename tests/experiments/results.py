"""The table `experiments` of a lake of its own: what each run came to, in one commit, so that none counts by halves."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from schemas.tables import Table
from schemas.trajectory import TIMESTAMP, column
from tests.experiments.arms import Plan

EXPERIMENTS = Table(
    "experiments",
    "a figure of a run at an evaluation",
    pa.schema(
        [
            column("experiment", pa.string(), "name of the experiment"),
            column("arm", pa.string(), "what it compares"),
            column("seed", pa.int64(), "run.seed: starting policy, tasks, sampling"),
            column("step", pa.int64(), "updates so far, each a weight version"),
            column("samples", pa.int64(), "episodes sampled for training so far"),
            column("metric", pa.string(), "which figure"),
            column("value", pa.float64(), "the figure"),
            column("wall_s", pa.float64(), "seconds of sampling and training so far, without evaluations"),
            column("fingerprint", pa.string(), "hash of the run's settings"),
            column("code", pa.string(), "version of the code"),
            column("at", TIMESTAMP, "when the run ended"),
        ]
    ),
)


@dataclass(frozen=True, slots=True)
class Measure:
    """What a run came to after `step` updates and `samples` episodes; `wall_s` is without evaluations."""

    step: int
    samples: int
    wall_s: float
    metric: str
    value: float


class Results:
    """The table in the lake at `folder`; made with the first run."""

    def __init__(self, folder: Path):
        self._uri = str(folder / EXPERIMENTS.name)

    def add(self, plan: Plan, measures: Iterable[Measure], code: str) -> None:
        """Commit a finished run."""
        now = datetime.now(UTC)
        stamp = {"experiment": plan.experiment.name, "arm": plan.arm.name, "seed": plan.seed, "at": now, "code": code}
        stamp["fingerprint"] = plan.fingerprint
        names = Measure.__dataclass_fields__
        rows = [stamp | {name: getattr(measure, name) for name in names} for measure in measures]
        write_deltalake(self._uri, pa.Table.from_pylist(rows, EXPERIMENTS.delta_schema), mode="append")

    def read(self) -> pa.Table:
        """All rows; none where no run has ended yet."""
        if not DeltaTable.is_deltatable(self._uri):
            return EXPERIMENTS.delta_schema.empty_table()
        return DeltaTable(self._uri).to_pyarrow_table()

    def finished(self) -> set[tuple[str, str, int, str]]:
        """The keys of the plans that have ended."""
        rows = self.read().select(["experiment", "arm", "seed", "fingerprint"]).to_pylist()
        return {(row["experiment"], row["arm"], row["seed"], row["fingerprint"]) for row in rows}


def lake(data: Path, quick: bool) -> Path:
    """Where the results lie, those of the quick form apart."""
    return data / "experiments" / ("quick" if quick else "full")
