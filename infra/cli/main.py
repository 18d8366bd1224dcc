"""`lagoon COMMAND …`: each command is a module with `run(argv) -> exit status`, imported when it is asked for."""

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from infra import disk
from schemas.errors import LagoonError

COMMANDS = {
    "demo": "see the whole loop work: start everything, learn for some minutes, stop, prove the books",
    "compare": "the loop synchronous and asynchronous, one after the other, in one table",
    "up": "start what is missing of the stack and of a run",
    "resume": "go on with a run from its last consistent state, also on a new machine and without its Kafka log",
    "down": "stop everything that was started; data stay",
    "status": "how each part is, and the loop's figures; exit status 1 if one is not well",
    "sql": "ask the lake a question in SQL",
    "explain": "one trajectory turn by turn: what was said, what came back, what was learned from it",
    "replay": "rebuild a lake from the Kafka log; send dead letters once more",
    "doctor": "check the installation and every place that Lagoon writes to; each finding says how to mend it",
}

_HELP = ("", "-h", "--help", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`; exit status 2 and one message for an error that Lagoon raises on purpose."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    try:
        status = _run(command, rest)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"lagoon {command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, `head` for example, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (LagoonError, OSError) as error:
        print(f"lagoon {command}: {_in_words(error)}", file=sys.stderr)
        return 2


def _run(command: str, rest: Sequence[str]) -> int:
    if command in _HELP:
        print(usage())
        return 0
    if command not in COMMANDS:
        print(f"lagoon: there is no command {command!r}\n\n{usage()}", file=sys.stderr)
        return 2
    return importlib.import_module(f"infra.cli.{command}").run(rest)


def _in_words(error: LagoonError | OSError) -> str:
    """What to tell of `error`; raises one that is a bug rather than a matter of the data folder."""
    if isinstance(error, LagoonError):
        return str(error)
    if isinstance(error, (PermissionError, NotADirectoryError, FileExistsError)) or error.errno == errno.EROFS:
        return f"{error}; look at run.data_dir, and whose it is"
    if disk.is_full(error):
        return f"{error}; make room there"
    raise error


def usage() -> str:
    """The help text."""
    lines = ["usage: lagoon COMMAND [--config FILE ...] [--section.key=value ...]", ""]
    lines += [f"  {name:<8} {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "`lagoon COMMAND --help` says more; docs/reference.md lists all settings."])


if __name__ == "__main__":
    sys.exit(main())
