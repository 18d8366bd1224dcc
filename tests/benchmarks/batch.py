"""What assembling batches costs: ExperienceStream to padded tensors, beside a bare Parquet read of the same columns.

OMP_NUM_THREADS=1 python -m tests.benchmarks.batch [--batches N] [--tokens N] [--runs N] [--out bench.jsonl]

The lake holds trajectories of `--tokens` tokens in commits of 256 rows. The stream tails them, keeps the live buffer,
chooses batches of 128, and makes length-sorted micro-batches of tensors; the reference reads the same columns of the
same files and does nothing with them. Runs alternate; figures are of the best run of each, because whatever else the
machine does only adds time. Ratio aimed at: 0.5 or more.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from infra.lake import Lake
from schemas.settings import Settings, load
from schemas.tables import EXPERIENCE
from tests.benchmarks.lines import keep
from tests.experience import Sample, experience
from trainers.batches import Split
from trainers.credit import Turns
from trainers.signals import share_of, signals
from trainers.stream import ExperienceStream, columns

BATCH, COMMIT, PARTS = 128, 256, 4


def main() -> None:
    """Measure, print a table, append a line to `--out`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pa.set_cpu_count(1)
    torch.set_num_threads(1)
    settings = load(overrides=[f"--loop.batch_size={BATCH}", "--loop.group_size=8"])
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake(folder)
        lake.ensure()
        fill(lake, options.batches * BATCH, options.tokens)
        figures = compare(lake, settings, options.runs)
    report(figures, options)


def fill(lake: Lake, rows: int, tokens: int) -> None:
    """Put `rows` trajectories of about `tokens` tokens into the lake: half prompt and observations, half actions."""
    random = np.random.default_rng(0)
    for sequence in range(1, rows // COMMIT + 1):
        made = [_sample(random, f"{sequence}/{i}", tokens) for i in range(COMMIT)]
        lake.append("experience", experience(made), "benchmark", sequence)


def _sample(random: np.random.Generator, name: str, tokens: int) -> Sample:
    length = int(random.integers(tokens // 2, tokens * 3 // 2))
    mask = np.arange(length) // 32 % 2 == 1
    logprobs = np.where(mask, -random.exponential(size=length), 0.0)
    ids = random.integers(0, 32_000, length)
    return Sample(name, priority=random.random(), token_ids=ids, action_mask=mask, behavior_logprobs=logprobs)


def compare(lake: Lake, settings: Settings, runs: int) -> dict[str, float]:
    """Trajectories per second of both, each in its best of `runs` alternating runs."""
    seconds: dict[str, list[float]] = {"assembly": [], "parquet": []}
    for _ in range(runs):
        seconds["parquet"].append(_timed(lambda: read(lake, settings)))
        seconds["assembly"].append(_timed(lambda: assemble(lake, settings)))
    rows = read(lake, settings)
    return {name: rows / min(values) for name, values in seconds.items()}


def read(lake: Lake, settings: Settings) -> int:
    """The reference: all rows' payload from Parquet."""
    rows = 0
    for path in sorted(Path(lake.table_uri(EXPERIENCE.name)).rglob("*.parquet")):
        with pq.ParquetFile(path) as file:
            present = set(file.schema_arrow.names)
            rows += file.read([name for name in columns(settings) if name in present]).num_rows
    return rows


def assemble(lake: Lake, settings: Settings) -> int:
    """The measured path: lake to tensors."""
    stream, rows = ExperienceStream(lake, settings), 0
    while True:
        stream.poll(1)
        if (batch := stream.take(1)) is None:
            return rows
        made = signals(batch.rows, batch.tokens, Turns.of(batch.rows, batch.tokens), settings)
        for part in share_of(batch.tokens, made, Split(PARTS), 0, 1):
            rows += len(part.rows)


def report(figures: dict[str, float], options: argparse.Namespace) -> None:
    """Print the table, and append the line."""
    ratio = figures["assembly"] / figures["parquet"]
    print(f"{'':28}{'trajectories/s':>16}{'batches/s':>12}")
    for name, label in (("parquet", "bare Parquet read"), ("assembly", "batches of tensors")):
        print(f"{label:28}{figures[name]:16,.0f}{figures[name] / BATCH:12.1f}")
    print(f"{'ratio':28}{ratio:16.2f}   (128 trajectories of about {options.tokens} tokens, one thread)")
    line = {
        "name": "batch assembly",
        "value": round(figures["assembly"]),
        "unit": "trajectories/s",
        "reference": round(figures["parquet"]),
        "ratio": round(ratio, 3),
    }
    keep(options.out, line)


def _timed(work: Callable[[], int]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
