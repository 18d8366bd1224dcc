"""`lagoon down`: stop what `lagoon up` started."""

from collections.abc import Sequence

from infra.cli import arguments
from infra.stack.bring_up import take_down


def run(argv: Sequence[str]) -> int:
    """Take the stack down."""
    parser = arguments.parser("down", "Stop all processes and servers of the data folder; what they wrote stays.")
    args, overrides = arguments.parse(parser, argv)
    data_dir = arguments.data_dir_of(args.config, overrides)
    take_down(data_dir, print)
    print(f"down; data stay in {data_dir}")
    return 0
