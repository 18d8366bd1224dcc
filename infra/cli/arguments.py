"""Arguments that all commands share: `--config FILE` and `--section.key=value`, and the settings that they mean."""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from schemas.errors import SettingsError
from schemas.settings import ENVIRONMENT_FILE, Settings, load

_OVERRIDE = re.compile(r"--\w+(\.[\w-]+)+=.*", re.DOTALL)

EPILOG = """\
Settings: --config FILE (TOML or JSON; repeat it, later files win), then --section.key=value on top. Without --config
they are those of the run that --run.name names, else of the newest run under --run.data_dir (default .lagoon).
"""


def parser(command: str, summary: str) -> argparse.ArgumentParser:
    """The parser of a command, with `--config`; overrides are left to `parse`."""
    made = argparse.ArgumentParser(
        prog=f"lagoon {command}",
        description=summary,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--config", action="append", default=[], metavar="FILE", help="settings file; repeatable")
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Known arguments, and overrides. Anything else ends the command with status 2 and its usage."""
    overrides = [a for a in argv if _OVERRIDE.fullmatch(a)]
    return made.parse_args([a for a in argv if a not in overrides]), overrides


def settings_of(files: Sequence[str], overrides: Sequence[str], must_exist: bool = True) -> Settings:
    """The settings that a command line means; a saved run's are of the data folder in which they are found.

    Raises:
        SettingsError: they are wrong, or there is no run that they could come from and `must_exist`.
    """
    if files:
        return load(files, overrides)
    saved, place = _saved(overrides)
    if saved.exists():
        return load([saved], [*overrides, *place])
    if must_exist:
        raise SettingsError(f"no settings at {saved}; run `lagoon up` first, or name a file with --config")
    return load([], overrides)


def data_dir_of(files: Sequence[str], overrides: Sequence[str]) -> str:
    """The data folder that a command line means, also where the settings of its run cannot be read.

    Raises:
        SettingsError: settings that the command line itself names are wrong.
    """
    saved, place = _saved(overrides)
    if files or not place:  # not the newest run of a data folder
        return load(files or [saved], overrides).run.data_dir
    return place[0].partition("=")[2]


def _saved(overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """Where the settings of the run lie, and the data folder that this is; they may have been saved in another one."""
    which = [o for o in overrides if o.startswith(("--run.name=", "--run.data_dir="))]
    run = load([], which).run
    if not which and os.environ.get(ENVIRONMENT_FILE):
        return Path(os.environ[ENVIRONMENT_FILE]), []
    data_dir = Path(run.data_dir).absolute()
    folder = run.folder if any(o.startswith("--run.name=") for o in which) else data_dir / "current"
    return folder / "settings.json", [f"--run.data_dir={data_dir}"]
