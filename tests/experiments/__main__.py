"""Runs what is not finished yet: python -m tests.experiments [--quick] [--only NAME ...] [--seeds N] [--jobs N]

Each run has one thread, ends as a commit to the lake, and is not run again. `python -m tests.experiments.report` draws.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.experiments.arms import QUICK_UPDATES, plans
from tests.experiments.results import Results, lake
from tests.experiments.variants import EXPERIMENTS
from tests.experiments.work import start, work

SEEDS, QUICK_SEEDS = 5, 2


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.experiments", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} seeds, {QUICK_UPDATES} updates")
    parser.add_argument("--only", nargs="+", choices=sorted(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--data", type=Path, default=Path(".lagoon"))
    options = parser.parse_args(arguments)
    seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)
    wanted = list(plans([EXPERIMENTS[name] for name in options.only], seeds, QUICK_UPDATES if options.quick else None))
    work(wanted, Results(lake(options.data, options.quick)), partial(start, data=options.data), options.jobs)


if __name__ == "__main__":
    main()
