"""The scenarios: each module of this folder has `run(rounds, folder)`, which kills, judges and returns its rows."""

import pkgutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from tests.chaos.table import Row


def _run(name: str, rounds: int, folder: Path) -> list[Row]:
    return import_module(f"{__name__}.{name}").run(rounds, folder)  # only when it is wanted: some need torch


SCENARIOS: dict[str, Callable[[int, Path], list[Row]]] = {
    name: partial(_run, name) for _, name, _ in pkgutil.iter_modules(__path__)
}
"""Name -> scenario. Rounds say how often each victim dies; the folder is the scenario's own, gone after it."""
