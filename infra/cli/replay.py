"""`lagoon replay trajectories|dead-letters`: the log once more, into another lake; or letters back into the log."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from infra import sql
from infra.claims import Claims
from infra.cli import arguments, letters, tables
from infra.lake import Lake
from infra.replays import refuse_used
from infra.stack.bring_up import resolve
from infra.stack.programs import ROOT, python_path
from infra.store import local_path
from schemas.errors import LagoonError, LakeError
from schemas.replay import Limit
from schemas.settings import Settings
from schemas.tables import DEAD_LETTERS, EXPERIENCE, GROUPS, LEDGER, TASK_DIFFICULTY

SUMMARY = """\
trajectories: rebuild a lake from the Kafka log, by running the curate flow over it once, into an empty place. With the
same settings it decides the same, row for row. --from and --to limit the trajectories (not the weight versions that
were published before): digits are an offset in every partition, anything else is a time.

dead-letters: send undecodable messages to `trajectories` once more, byte for byte, after the reader was mended. --where
is an SQL condition on their rows (see view `letters`). A letter that was sent twice counts once.
"""

_TABLES = (EXPERIENCE, LEDGER, GROUPS, TASK_DIFFICULTY, DEAD_LETTERS)


def run(argv: Sequence[str]) -> int:
    """Do what was asked."""
    parser = arguments.parser("replay", SUMMARY)
    parser.add_argument("what", choices=["trajectories", "dead-letters"])
    parser.add_argument("--from", dest="start", metavar="TIME|OFFSET", help="first message; default: the oldest")
    parser.add_argument("--to", dest="end", metavar="TIME|OFFSET", help="end before this message; default: the newest")
    parser.add_argument("--into", metavar="LAKE_URI", help="folder or object store of the new lake")
    parser.add_argument("--where", metavar="SQL", help="for example: \"error like '%%version%%'\"")
    parser.add_argument("--dry-run", action="store_true", help="only say which letters would be sent")
    args, overrides = arguments.parse(parser, argv)
    needed = "into" if args.what == "trajectories" else "where"
    if not getattr(args, needed):
        parser.error(f"{args.what} need --{needed}")
    settings = resolve(arguments.settings_of(args.config, overrides))
    return (
        _trajectories(settings, args)
        if args.what == "trajectories"
        else letters.replay(settings, args.where, args.dry_run)
    )


def _trajectories(settings: Settings, args: argparse.Namespace) -> int:
    limits = [f"--{name}={text}" for name, text in (("from", args.start), ("to", args.end)) if text is not None]
    for text in (args.start, args.end):
        if text is not None:
            Limit.of(text)
    folder = local_path(args.into)
    into = args.into.rstrip("/") if folder is None else str(folder)
    refuse_used(into, settings.lake.storage_options)
    with tempfile.TemporaryDirectory(prefix="lagoon-replay-") as scratch:
        _run_flow(_elsewhere(settings, into, scratch), Path(scratch), limits)
    _show(Lake(into, settings.lake.storage_options))
    return 0


def _elsewhere(settings: Settings, into: str, scratch: str) -> Settings:
    """`settings` with another lake, and a run folder of its own for recovery state and telemetry."""
    return settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"data_dir": scratch}),
            "lake": settings.lake.model_copy(update={"uri": into, "claims_uri": Claims.of(settings).uri}),
            "telemetry": settings.telemetry.model_copy(update={"port": 0}),
        }
    )


def _run_flow(settings: Settings, scratch: Path, limits: Sequence[str]) -> None:
    saved, log = scratch / "settings.json", scratch / "replay.log"
    settings.save(saved)
    command = ["env", f"PYTHONPATH={python_path()}", sys.executable, "-m", "flows.replay", "--config", str(saved)]
    with open(log, "wb") as stderr:
        process = subprocess.Popen([*command, *limits], cwd=ROOT, stderr=stderr)
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the terminal has interrupted the process too
            process.wait()
            raise
    if status:
        raise LagoonError(f"{_last_error(log, status)}\nThe lake at {settings.lake.uri} is incomplete: empty it first")


def _last_error(log: Path, status: int) -> str:
    """What the process said last of why it ended."""
    lines = log.read_text(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            return str(json.loads(line)["error"])
        except (ValueError, KeyError, TypeError):
            continue
    return f"the flow ended with status {status}: {' '.join(lines[-3:]) or 'without a word'}"


def _show(lake: Lake) -> None:
    with sql.connect(lake) as connection:
        counts = [connection.sql(f"SELECT count(*) FROM {t.name}").fetchall()[0][0] for t in _TABLES]  # noqa: S608
    rows = [[t.name, f"{count:,}"] for t, count in zip(_TABLES, counts, strict=True)]
    tables.show(tables.table(["table", "rows"], rows, f"the lake at {lake.uri}"))
    if not any(counts):
        raise LakeError("nothing was in that range of the log")
