"""A program in place of one that was killed: what that left behind, a child that holds its port, is ended first.

python -m infra.stack.succeed COMMAND ...

For programs that work through a child of their own. Run by the supervisor, whose marks tell whose child a process is;
then this process becomes COMMAND.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from infra.stack.supervise import MARK, PROGRAM_MARK, marked
from schemas.errors import DeadlineError

LIMIT_S = 10.0


def main(command: Sequence[str]) -> None:
    """End what an earlier life of this program has left, then become `command`.

    Raises:
        DeadlineError: something is still there LIMIT_S after its SIGKILL.
    """
    program, deadline = os.environ[PROGRAM_MARK], time.monotonic() + LIMIT_S
    while left := marked(os.environ[MARK], program):
        if time.monotonic() > deadline:
            raise DeadlineError(f"processes {left} of {program} are still there {LIMIT_S:g} s after SIGKILL")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    os.execvp(command[0], [*command])  # noqa: S606 - the supervisor shall see the same process


if __name__ == "__main__":
    main(sys.argv[1:])
