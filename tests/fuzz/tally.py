"""What went in and what came of it, class by class; and the command line of a part of the fuzzing."""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

MAX_RESIDENT_BYTES = 1024**3


class Tally:
    """Outcomes by class. An outcome that a class may not have, or none, is a fault."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.outcomes: dict[str, Counter[str]] = {}
        self.faults: list[str] = []

    def note(self, kind: str, outcome: str, times: int = 1) -> None:
        """`times` inputs of class `kind` ended as `outcome`."""
        self.outcomes.setdefault(kind, Counter())[outcome] += times

    def lines(self) -> Iterator[str]:
        """The table."""
        for kind, sent in self.sent.items():
            found = self.outcomes.get(kind, Counter[str]())
            told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.items()))
            yield f"{kind:<24} {sent:>6} in = {told}: {'balanced' if found.total() == sent else 'NOT BALANCED'}"

    def problems(self) -> list[str]:
        """What is wrong, in words; empty if nothing."""
        unequal = [k for k, sent in self.sent.items() if self.outcomes.get(k, Counter[str]()).total() != sent]
        return [*self.faults, *(f"{kind}: what came out is not what went in" for kind in unequal)]


def peak_bytes(pid: int | str = "self") -> int:
    """The most memory that a process has had; its `ru_maxrss` would count what its parent had when it forked."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def main(name: str, fuzz: Callable[[int, int], Tally], count: int, argv: Iterable[str] | None = None) -> int:
    """Print the table of `fuzz(count, seed)` and what is wrong; exit status 0 if nothing is and memory was bounded."""
    parser = argparse.ArgumentParser(prog=f"tests.fuzz.{name}")
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(None if argv is None else list(argv))
    started, tally = time.monotonic(), fuzz(args.count, args.seed)
    print(*tally.lines(), sep="\n")
    peak, problems = peak_bytes(), tally.problems()
    problems += [f"{peak} bytes of memory, expected at most {MAX_RESIDENT_BYTES}"] if peak > MAX_RESIDENT_BYTES else []
    print(f"{name}: peak memory {peak / 1024**2:.0f} MiB (bound {MAX_RESIDENT_BYTES / 1024**2:.0f})")
    took = time.monotonic() - started
    print(*problems[:20], f"{len(problems)} faults in {tally.sent.total()} inputs, {took:.0f} s", sep="\n")
    return 1 if problems else 0
