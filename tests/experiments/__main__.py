"""Runs what is not finished yet: python -m tests.experiments [--quick] [--only NAME ...] [--seeds N] [--jobs N]

Each run has one thread, ends as a commit to the lake, and is not run again. `python -m tests.experiments.report` draws.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from infra.stack.policy import check_packages
from schemas.errors import SettingsError
from tests.experiments.arms import Experiment, plans, settings_of
from tests.experiments.results import Results, lake
from tests.experiments.variants import EXPERIMENTS
from tests.experiments.work import start, work


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.experiments", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer seeds, short runs: no finding")
    parser.add_argument("--only", nargs="+", choices=sorted(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, help="in place of each experiment's own number")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--data", type=Path, default=Path(".lagoon"))
    options = parser.parse_args(arguments)
    chosen = [EXPERIMENTS[name].small if options.quick else EXPERIMENTS[name] for name in options.only]
    if options.seeds:
        chosen = [replace(experiment, seeds=options.seeds) for experiment in chosen]
    missing = {experiment.name: fault for experiment in chosen if (fault := unmet(experiment, options.data))}
    wanted = list(plans([experiment for experiment in chosen if experiment.name not in missing]))
    work(wanted, Results(lake(options.data, options.quick)), partial(start, data=options.data), options.jobs)
    for name, fault in missing.items():
        print(f"{name} is left out: {fault}")


def unmet(experiment: Experiment, data: Path) -> str:
    """What has to be installed for the policy of `experiment`; empty where nothing has."""
    try:
        check_packages(settings_of(0, {"run.data_dir": str(data)}, experiment.base))
    except SettingsError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
