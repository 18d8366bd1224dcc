"""A wall clock that a test sets, for whole processes: Python, Bytewax, Kafka's client, a Java broker.

Replacing `time.time` would reach the Python in a process only; Bytewax, which times epochs by the wall clock, is Rust.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PLACE = "LAGOON_TEST_CLOCK"
"""Environment variable that names the file in which the clock is kept."""

SOURCE = Path(__file__).with_suffix(".c")


class ShiftedClock:
    """The clock of all processes that have `environment`; 0 seconds off at first."""

    def __init__(self, folder: Path) -> None:
        library = folder / "shifted_clock.so"
        self._file = folder / "clock"
        self.set(0)
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        self.environment = {"LD_PRELOAD": str(library), PLACE: str(self._file)}

    def set(self, seconds: int) -> None:
        """From now on it is off by so much, in all of them at once."""
        set_clock(self._file, seconds)


def set_clock(file: Path, seconds: int) -> None:
    """Put the clock that is kept in `file` off by so much; processes have the file mapped."""
    with open(file, "r+b" if file.exists() else "xb", buffering=0) as clock:
        clock.write(seconds.to_bytes(8, "little", signed=True))


def shifted_clock(folder: Path) -> ShiftedClock:
    """A clock, or a skipped test where nothing compiles C."""
    if shutil.which("cc") is None or os.name != "posix":
        pytest.skip("no C compiler (cc), so no clock can be set for whole processes")
    return ShiftedClock(folder)
