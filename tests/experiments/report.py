"""Redraws plots and tables from the lake: python -m tests.experiments.report [--quick] [--docs docs] [--compare FILE]

Plots go to `<docs>/results/`, tables into `<docs>/results.md` between `<!-- NAME -->` and `<!-- end -->`; the text that
is around them stays. `--compare` takes the JSON of `lagoon compare`.
"""

import argparse
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa

from tests.experiments.arms import Experiment
from tests.experiments.comparison import comparison
from tests.experiments.findings import Findings, findings, table
from tests.experiments.plots import draw
from tests.experiments.results import Results, lake
from tests.experiments.variants import EXPERIMENTS

PACKAGES = ("torch", "deepspeed", "transformers", "bytewax", "deltalake")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.experiments.report", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="of the quick form; its docs are <data>/experiments/quick")
    parser.add_argument("--data", type=Path, default=Path(".lagoon"))
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--compare", type=Path, help="the JSON that `lagoon compare` wrote")
    options = parser.parse_args(arguments)
    folder = lake(options.data, options.quick)
    docs = options.docs or (folder if options.quick else Path("docs"))
    experiments = [each.small if options.quick else each for each in EXPERIMENTS.values()]
    report(experiments, Results(folder).read(), docs, options.compare)


def report(experiments: Sequence[Experiment], rows: pa.Table, docs: Path, compare: Path | None = None) -> None:
    """Draw each of `experiments` that has a finished run, and fill in `docs/results.md`; prints the tables."""
    found = [findings(experiment, rows) for experiment in experiments]
    blocks = {"machine": machine(rows)}
    for each in (each for each in found if each.num_runs):
        plot = draw(each, docs / "results")
        blocks[each.experiment.name] = _section(each, plot.relative_to(docs))
        print(f"{each.experiment.name}: {each.experiment.question}\n{table(each)}\n")
    if compare is not None and compare.exists():
        blocks["compare"] = comparison(json.loads(compare.read_text())["rounds"])
    page = docs / "results.md"
    before = page.read_text() if page.exists() else "\n".join(f"<!-- {name} -->\n<!-- end -->\n" for name in blocks)
    page.write_text(filled(before, blocks))
    print(f"report: {page}")


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """`page` with what stands between the marks of each block replaced."""
    for name, block in blocks.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = mark.sub(lambda found, block=block: f"{found[1]}{block}\n{found[2]}", page)
    return page


def machine(rows: pa.Table) -> str:
    """Where and with what it ran."""
    codes = sorted({*rows["code"].to_pylist()} - {"unknown"})
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    where = f"{os.cpu_count()} cores of {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    return f"{where}; {versions}; one thread a run; code {', '.join(codes) or 'unknown'}."


def _section(found: Findings, plot: Path) -> str:
    return f"{table(found)}\n\n![{found.experiment.question}]({plot.as_posix()})"


if __name__ == "__main__":
    main()
