"""What a sandboxed program may use, and what came of it."""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program. Memory and CPU time are per process: the most of all is their product with `processes`.

    Attributes:
        wall_s: Seconds from its start to its end; then everything that it started is killed.
        cpu_s: Seconds of CPU time of one process.
        memory_bytes: Address space of one process.
        tmp_bytes: Size of /tmp, the only place where it can write; also the longest file.
        output_bytes: What is kept of standard output, and of standard error; the rest is read and dropped.
        processes: Processes and threads at one time.
        open_files: Descriptors of one process.
    """

    wall_s: float = 5.0
    cpu_s: int = 5
    memory_bytes: int = 512 * MIB
    tmp_bytes: int = 16 * MIB
    output_bytes: int = 64 << 10
    processes: int = 8
    open_files: int = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a script ended. `status` is its exit code, negative for a signal, None when the time was up."""

    status: int | None
    stdout: str
    stderr: str
    dropped_bytes: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checker said of one test; `why` when it did not pass."""

    passed: bool
    why: str | None = None


class SandboxError(Exception):
    """The sandbox itself failed, or the tests are broken; nothing is said about the program."""
