"""Faults to plant: each folder has a `sitecustomize.py`, which Python runs at the start of a process that finds it."""

import os
from pathlib import Path

from infra.stack.programs import ROOT

FOLDER = Path(__file__).parent


def planted(name: str) -> dict[str, str]:
    """The environment of a process with fault `name`."""
    return {"PYTHONPATH": os.pathsep.join([str(FOLDER / name), str(ROOT)])}
