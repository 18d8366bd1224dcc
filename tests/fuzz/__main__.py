"""Everything hostile: messages, JSON messages, weight versions, checkpoints, and the decoder under coverage guidance.

python -m tests.fuzz [--count 10000] [--seed 1]

Each part is a process of its own, so that its peak memory is. Exit status 0 if all of them end with 0.
"""

import argparse
import subprocess
import sys

from infra.stack.programs import ROOT

PARTS = {
    "messages": ("--count", 1.0),
    "consumers": ("--count", 0.3),
    "weights": ("--count", 0.15),
    "checkpoints": ("--count", 0.2),
    "decoder": ("--runs", 20.0),
}
"""Module -> how it is told how much, and how much for one of `--count`."""


def main() -> int:
    """Run the parts, one after the other."""
    parser = argparse.ArgumentParser(prog="tests.fuzz")
    parser.add_argument("--count", type=int, default=10_000, help="hostile trajectory messages; others in proportion")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    statuses: dict[str, int] = {}
    for part, (option, share) in PARTS.items():
        print(f"== {part}", flush=True)
        command = [sys.executable, "-m", f"tests.fuzz.{part}", option, str(round(args.count * share))]
        statuses[part] = subprocess.run([*command, f"--seed={args.seed}"], cwd=ROOT, check=False).returncode
    failed = [part for part, status in statuses.items() if status]
    print(f"== {'FAILED: ' + ', '.join(failed) if failed else 'all balanced, all within their memory'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
