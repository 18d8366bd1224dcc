"""The scenarios: each module of this folder has `run(rounds, folder)`, which kills, judges and returns its rows."""

import pkgutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tests.chaos.table import Row

SCENARIOS: dict[str, Callable[[int, Path], list[Row]]] = {
    name: import_module(f"{__name__}.{name}").run for _, name, _ in pkgutil.iter_modules(__path__)
}
"""Name -> scenario. Rounds say how often each victim dies; the folder is the scenario's own, gone after it."""
