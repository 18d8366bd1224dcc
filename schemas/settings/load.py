"""Where settings come from: files, overrides, the current run."""

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from schemas.errors import SettingsError
from schemas.settings.whole import Settings

ENVIRONMENT_FILE = "LAGOON_SETTINGS"
"""Environment variable that names the settings file of a run."""


def load(files: Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> Settings:
    """Settings from `files` (TOML or JSON, left to right) and `overrides` (`--section.key=value`).

    Values of overrides are read as TOML (`3`, `true`, `[1, 2]`), else as text.

    Raises:
        SettingsError: a file that is missing or malformed, an unknown key, a value out of bounds, a contradiction.
    """
    merged: dict[str, Any] = {}
    for file in files:
        _merge(merged, _read(Path(file)))
    for override in overrides:
        _merge(merged, _parse(override))
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise SettingsError("\n".join(_fault(e) for e in error.errors())) from error


def current(data_dir: str = ".lagoon", overrides: Sequence[str] = ()) -> Settings:
    """Settings of the run in `$LAGOON_SETTINGS`, else of the run that `lagoon up` or `lagoon demo` started last.

    `overrides` as for `load`. What is found in `data_dir` is of that folder, whichever it was saved in.

    Raises:
        SettingsError: there is no such run.
    """
    given = os.environ.get(ENVIRONMENT_FILE)
    path = given or os.path.join(data_dir, "current", "settings.json")
    if not Path(path).exists():
        raise SettingsError(
            f"no settings at {path}; run `lagoon up` first, or name a file with --config or ${ENVIRONMENT_FILE}"
        )
    return load([path], overrides if given else [f"--run.data_dir={os.path.abspath(data_dir)}", *overrides])


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"cannot read settings file {path}: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"settings file {path} is malformed: {error}") from error


def _parse(override: str) -> dict[str, Any]:
    name, equals, text = override.removeprefix("--").partition("=")
    if not equals or "." not in name:
        raise SettingsError(f"cannot read {override!r}; expected --section.key=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    section, *path = name.split(".")
    for part in reversed(path):
        value = {part: value}
    return {section: value}


def _merge(into: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _fault(error: Any) -> str:
    where = ".".join(map(str, error["loc"])) or "settings"
    is_told = not isinstance(error.get("input"), dict) and "password" not in error["msg"]
    observed = f" (got {error.get('input')!r})" if is_told else ""
    return f"{where}: {error['msg'].removeprefix('Value error, ')}{observed}"
