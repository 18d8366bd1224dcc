"""Coverage-guided fuzzing of the decoder: any bytes and headers end in rows or in a dead letter that says why.

python -m tests.fuzz.decoder [--runs 200000] [--seed 1]

Starts from messages of all classes and mutates what reaches new code (https://github.com/google/atheris). Exit status
0 if every input became rows or exactly one dead letter, and memory stayed below MAX_RESIDENT_MIB. An input that did
not is left in `.lagoon/crash-*`, which libFuzzer's output names.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import atheris

from infra.stack.programs import ROOT

with atheris.instrument_imports(include=["schemas", "flows.steps", "flows.connectors"]):
    from flows.connectors.items import Raw
    from flows.steps.decode import decode
    from flows.steps.route import shards
    from flows.steps.validate import validate
    from schemas.names import Header
    from schemas.replay import REPLAYED
    from schemas.settings import Settings
    from schemas.topics import CONTROL, TRAJECTORIES, WEIGHTS
    from schemas.wire import MAX_PACK

from tests.fuzz.classes import CLASSES
from tests.samples import T0_MS, clock, weights

MAX_RESIDENT_MIB = 1024
NAMES = (*map(str, Header), REPLAYED)
"""Headers, in the order of their values in an input."""

TOPICS = (TRAJECTORIES.name, WEIGHTS.name, CONTROL.name)
FAMILIES = Settings().families


def message(data: bytes) -> Raw:
    """The message that `data` stand for: topic, values of the headers (length, bytes), and the body is the rest."""
    topic, rest, headers = TOPICS[data[0] % 4 % 3] if data else TOPICS[0], data[1:], list[tuple[str, bytes]]()
    for name in NAMES:
        length = rest[0] if rest else 0
        if length:
            headers.append((name, rest[1 : 1 + length]))
        rest = rest[1 + length :]
    return Raw(topic, 0, 5, T0_MS, b"key", tuple(headers), rest)


def as_input(topic: str, headers: dict[str, bytes], body: bytes) -> bytes:
    """The inverse of `message`."""
    values = [headers.get(name, b"")[:255] for name in NAMES]
    return bytes([TOPICS.index(topic)]) + b"".join(bytes([len(v)]) + v for v in values) + body


def judge(data: bytes) -> None:
    """Take `data` from bytes to rows or a dead letter.

    Raises:
        AssertionError: it became neither, or both.
    """
    raw = message(data)
    for shard in shards(raw, 4):
        chunk = validate(decode(shard, [raw], {}), FAMILIES)
        letters = [row for batch in chunk.dead_letters for row in batch.to_pylist() if row["kind"] == "undecodable"]
        told = raw.topic == TRAJECTORIES.name or shard == 0  # every shard sees a note; one keeps it
        assert len(chunk.events) + len(letters) == (1 if told or chunk.events else 0), (chunk, letters)
        assert all(letter["error"] and letter["value"] == raw.value for letter in letters), letters
        assert chunk.rows.num_rows == len(chunk.faults) <= MAX_PACK, chunk
        assert bool(chunk.rows.num_rows) == (raw.topic == TRAJECTORIES.name and not letters), chunk


def write_corpus(folder: Path, seed: int, of_each: int = 4) -> int:
    """Some messages of each class, as inputs to begin with; returns how many."""
    rng = random.Random(seed)
    made = [make(rng, n) for n, make in enumerate([*CLASSES.values()] * of_each)]
    inputs = [as_input(TRAJECTORIES.name, sent.headers, sent.body) for sent in made if len(sent.body) < 100_000]
    inputs += [as_input(raw.topic, {}, raw.value) for raw in (weights(1, 0), clock(0, 0))]
    for number, data in enumerate(inputs):
        (folder / f"{number:04d}").write_bytes(data)
    return len(inputs)


def fuzz(runs: int, seed: int) -> int:
    """Fuzz in a process of its own, which libFuzzer ends; returns its exit status."""
    with tempfile.TemporaryDirectory(prefix="lagoon-fuzz-") as name:
        print(f"decoder: {write_corpus(Path(name), seed)} inputs to begin with, {runs} runs", flush=True)
        options = [f"-runs={runs}", f"-seed={seed}", f"-rss_limit_mb={MAX_RESIDENT_MIB}", "-timeout=10"]
        options += ["-max_len=65536", "-print_final_stats=1", "-reload=0", "-artifact_prefix=.lagoon/"]
        command = [sys.executable, "-m", "tests.fuzz.decoder", "--inside", *options, name]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace") as process:
            for line in process.stderr or ():
                if not _is_routine(line):
                    print(line, end="", flush=True)
        return process.returncode


def _is_routine(line: str) -> bool:
    """Whether libFuzzer only tells of an input that it keeps."""
    return "\tNEW " in line or "\tREDUCE " in line or line.startswith(("INFO: Instrumenting", "INFO: Loaded"))


def main(argv: Sequence[str]) -> int:
    """Start the fuzzer, or be it."""
    if argv[:1] == ["--inside"]:
        atheris.Setup([sys.argv[0], *argv[1:]], judge)
        atheris.Fuzz()
    parser = argparse.ArgumentParser(prog="tests.fuzz.decoder")
    parser.add_argument("--runs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    return fuzz(args.runs, args.seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
