"""Chaos: real processes, really killed, and judges that compare what is left with records of their own.

python -m tests.chaos [--rounds N] [--only curate,loop] [--seed S] [--out chaos.json]

Exit status 0 only if nothing was lost, duplicated or left unexplained.
"""

import argparse
import dataclasses
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.scenarios import SCENARIOS
from tests.chaos.table import Row, merge, passed, render


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scenarios one after the other, and print the table."""
    parser = argparse.ArgumentParser(prog="tests.chaos")
    parser.add_argument("--rounds", type=int, default=1, help="how often each scenario kills each of its victims")
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios, separated by commas")
    parser.add_argument("--seed", type=int, default=1, help="of the random moments and victims")
    parser.add_argument("--out", type=Path, help="file for the table as JSON")
    args = parser.parse_args(argv)
    names = [name for name in args.only.split(",") if name]
    if unknown := sorted({*names} - {*SCENARIOS}):
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    rows, started = [], time.monotonic()
    for name in names:
        rows += _run(name, args.rounds, args.seed, started)
    rows = merge(rows)
    print(render(rows))
    if args.out:
        args.out.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    return 0 if passed(rows) else 1


def _run(name: str, rounds: int, seed: int, started: float) -> list[Row]:
    print(f"{time.monotonic() - started:6.0f} s  {name}: {rounds} rounds", flush=True)
    random.seed(f"{seed}/{name}")
    folder = Path(tempfile.mkdtemp(prefix=f"lagoon-chaos-{name}-"))
    rows = SCENARIOS[name](rounds, folder)
    outcome = "nothing wrong" if passed(rows) else f"FAILED; see {folder}"
    if passed(rows):
        shutil.rmtree(folder)
    kills = sum(row.kills for row in rows)
    print(f"{time.monotonic() - started:6.0f} s  {name}: {kills} kills, {outcome}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
