"""What a commit and a tail's poll cost as a table's log grows, with and without maintenance.

OMP_NUM_THREADS=1 python -m tests.benchmarks.commits [--long] [--table NAME] [--out bench.jsonl]

Windows of a hundred commits end at 100, 1,000 and with --long 10,000 commits: one row is staged and committed at a
time, as the flows' sinks do, and a tail polls after each commit. What lies between the windows is written straight into
the log, copies of a real commit. A lake with maintenance, one without, and a new one, the reference, take turns commit
by commit, so that whatever else the machine does slows all alike; figures are medians. Staging does not depend on the
log and is not measured. Maintenance runs every hundred commits, outside the windows. Ratio aimed at: 2 or less.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from infra.delta_log import Action
from infra.lake import Lake
from infra.maintain import Upkeep
from infra.maintenance.compaction import open_table
from infra.maintenance.logs import checkpoint
from infra.tail import Tail
from schemas.settings import load
from schemas.tables import TABLES
from tests.benchmarks.lines import keep
from tests.rows import row

WINDOW = 100
Figures = dict[str, dict[str, float]]


class Case:
    """A lake that grows, and what its last hundred commits and polls cost, milliseconds."""

    def __init__(self, folder: str, table: str, maintained: bool):
        settings = load(overrides=[f"--run.data_dir={folder}/{uuid.uuid4().hex}"])
        self.table, self.lake = table, Lake.of(settings)
        self.lake.ensure()
        self.tail = Tail(self.lake, table)
        self.upkeep = Upkeep(settings) if maintained else None
        self.num_commits, self.upkeep_s = 0, 0.0
        self.costs: dict[str, list[float]] = {"commit": [], "poll": []}

    def step(self) -> None:
        """A measured commit, and a poll."""
        self.num_commits += 1
        adds = self.lake.stage(self.table, _row(self.table))
        commit = _timed(lambda: self.lake.commit(self.table, adds, "benchmark", self.num_commits))
        for kind, cost in (("commit", commit), ("poll", _timed(self.tail.poll))):
            self.costs[kind] = [*self.costs[kind], cost][-WINDOW:]

    def grow(self, commits: int) -> None:
        """Copies of the newest commit, until there are `commits`; a checkpoint, and maintenance, every hundred."""
        template = self.lake.log(self.table).commit(self.tail.version) if self.num_commits else None
        while template and self.num_commits < commits:
            version = self.lake.version(self.table)
            for number in range(1, WINDOW + 1):
                self._copy(template, version + number, self.num_commits + number)
            self.num_commits += WINDOW
            checkpoint(self.lake, self.table)
            if self.upkeep:
                self.upkeep_s += _timed(self.upkeep.run) / 1000
            while self.tail.poll():
                pass

    def check(self) -> "Case":
        """Every row is there."""
        rows = open_table(self.lake, self.table).to_pyarrow_dataset().count_rows()
        assert rows == self.num_commits, (rows, self.num_commits)
        return self

    def _copy(self, template: list[Action], version: int, sequence: int) -> None:
        folder, actions = Path(self.lake.table_uri(self.table)), json.loads(json.dumps(template))
        for action in actions:
            if add := action.get("add"):
                source = folder / add["path"]
                add["path"] = str(Path(add["path"]).with_name(f"part-{version}-{uuid.uuid4()}.parquet"))
                os.link(source, folder / add["path"])
            if transaction := action.get("txn"):
                transaction["version"] = sequence
        log = folder / "_delta_log" / f"{version:020d}.json"
        log.write_text("\n".join(map(json.dumps, actions)) + "\n")


def main() -> None:
    """Measure, print a table, append lines to `--out`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--long", action="store_true", help="10,000 commits too")
    parser.add_argument("--table", default="groups", choices=sorted(TABLES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pa.set_cpu_count(1)
    print(f"{'maintenance':13}{'commits':>8}{'files':>8}{'commit ms':>11}{'ratio':>7}{'poll ms':>10}{'ratio':>7}")
    with tempfile.TemporaryDirectory() as folder:
        cases = {"without": Case(folder, options.table, False), "with": Case(folder, options.table, True)}
        for mark in (100, 1_000, *([10_000] if options.long else [])):
            figures = measure(cases, Case(folder, options.table, False), mark)
            show(cases, figures, mark)
        upkeep_s = cases["with"].check().upkeep_s
        cases["without"].check()
    print(f"{mark // WINDOW - 1} passes of maintenance took {upkeep_s:.1f} s")
    if options.out:
        write(options.out, figures, mark)


def measure(cases: dict[str, Case], reference: Case, mark: int) -> Figures:
    """Medians of the hundred commits that end at `mark`, and of the first hundred of a new lake."""
    for case in cases.values():
        case.grow(mark - WINDOW)
    everyone = {**cases, "reference": reference}
    for _ in range(WINDOW):
        for case in everyone.values():
            case.step()
    return {name: {k: statistics.median(v) for k, v in case.costs.items()} for name, case in everyone.items()}


def show(cases: dict[str, Case], figures: Figures, mark: int) -> None:
    """Print a line for each case."""
    for name, case in cases.items():
        own, reference = figures[name], figures["reference"]
        ratios = {kind: own[kind] / reference[kind] for kind in own}
        files = len(open_table(case.lake, case.table).file_uris())
        print(
            f"{name:13}{mark:8,}{files:8,}{own['commit']:11.2f}{ratios['commit']:7.2f}"
            f"{own['poll']:10.3f}{ratios['poll']:7.2f}"
        )


def write(out: Path, figures: Figures, mark: int) -> None:
    """Append a line for each figure."""
    reference = figures.pop("reference")
    for name, own in figures.items():
        for kind, value in own.items():
            line = {"name": f"{kind} after {mark} commits, {name} maintenance", "value": round(value, 3)}
            line |= {"unit": "ms", "reference": round(reference[kind], 3)}
            keep(out, line | {"ratio": round(value / reference[kind], 3)})


def _row(table: str) -> pa.Table:
    return pa.Table.from_pylist([row(table)], TABLES[table].delta_schema)


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


if __name__ == "__main__":
    main()
