"""`lagoon resume RUN`: go on with a run from one consistent state."""

from collections.abc import Sequence
from pathlib import Path

from infra.cli import arguments
from infra.resume import place
from infra.resume.resume import resume
from schemas.settings import Settings, load

SUMMARY = """\
Go on with a run from its newest run manifest of which everything is there: lake, weight store and checkpoint prove to
be what it says, before anything is started. On a new machine copy lake, weights, checkpoints and settings.json to
<data_dir>/runs/RUN first, where they are not in an object store. Where Kafka's log and the state of the flows are there
as well, nothing is lost; else the run begins a new life on new topics, and what was in flight is named as lost.

Addresses on this machine that this data folder's stack does not know are taken for those of the old place; name others
with --kafka.brokers=… or --tracking.uri=….
"""


def run(argv: Sequence[str]) -> int:
    """Resume a run."""
    parser = arguments.parser("resume", SUMMARY)
    parser.add_argument("run", metavar="RUN", help="name of the run")
    args, overrides = arguments.parse(parser, argv)
    settings = resume(_settings(args.run, args.config, overrides), lambda line: print(line, flush=True))
    print(f"\nrun     {settings.run.name} in {settings.run.folder}, life {settings.run.life}")
    print("lagoon status    how it goes")
    return 0


def _settings(name: str, files: Sequence[str], overrides: Sequence[str]) -> Settings:
    """The run's saved settings, `files` and `overrides` over them, in the data folder that they were found in."""
    named = [*overrides, f"--run.name={name}"]
    places = [o for o in named if o.startswith(("--run.name=", "--run.data_dir="))]
    run = load([], places).run
    saved: list[str | Path] = [p for p in [run.folder / "settings.json"] if p.exists()]
    if not saved and not files:
        return arguments.settings_of([], places)  # says what is missing
    places.append(f"--run.data_dir={run.data_dir}")
    return place.settled(load([*saved, *files], [*named, *places]), load(saved, places))
