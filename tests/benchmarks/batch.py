"""What assembling batches costs: ExperienceStream to padded tensors, beside a bare Parquet read and a plain loader.

OMP_NUM_THREADS=1 python -m tests.benchmarks.batch [--batches N] [--tokens N] [--runs N] [--out bench.jsonl]

The lake holds trajectories of `--tokens` tokens in commits of 256 rows. The stream tails them, keeps the live buffer,
draws batches of 128, groups of 8 together, and makes length-sorted micro-batches with advantages by turn. The bare
read takes the same columns of the same files and does nothing with them: what no loader can beat. The plain loader
makes tensors of them in the order of the files, as one would by hand: no log, buffer, draw, staleness, turns or resume.
Runs alternate; figures are of processor time in the best run of each, because whatever else the machine does only adds.
Ratio to the bare read aimed at: 0.5 or more.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn.utils.rnn import pad_sequence

from infra.lake import Lake
from schemas.settings import Settings, load
from schemas.tables import EXPERIENCE
from tests.benchmarks.lines import keep
from tests.experience import Sample, experience
from trainers.batches import Split, Tokens
from trainers.credit import Turns
from trainers.signals import share_of, signals
from trainers.stream import ExperienceStream, columns

BATCH, COMMIT, GROUP, PARTS = 128, 256, 8, 4


def main() -> None:
    """Measure, print a table, append a line to `--out`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    pa.set_cpu_count(1)
    torch.set_num_threads(1)
    settings = load(overrides=[f"--loop.batch_size={BATCH}", f"--loop.group_size={GROUP}"])
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
        made = [_sample(random, f"{sequence}/{i}", f"{sequence}/{i // GROUP}", tokens) for i in range(COMMIT)]
        lake.append("experience", experience(made), "benchmark", sequence)


def _sample(random: np.random.Generator, name: str, group: str, tokens: int) -> Sample:
    length = int(random.integers(tokens // 2, tokens * 3 // 2))
    mask = np.arange(length) // 32 % 2 == 1
    logprobs = np.where(mask, -random.exponential(size=length), 0.0)
    ids = random.integers(0, 32_000, length)
    reward = float(random.random() < 0.5)
    return Sample(name, 1, reward, 0.5, 0.5, group, random.random(), ids, mask, logprobs)


def compare(lake: Lake, settings: Settings, runs: int) -> dict[str, float]:
    """Trajectories per second of each, in its best of `runs` alternating runs."""
    works = {"parquet": _read_all, "plain": plain, "assembly": assemble}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    rows = 0
    for _ in range(runs):
        for name, work in works.items():
            began = time.process_time()
            rows = work(lake, settings)
            seconds[name].append(time.process_time() - began)
    return {name: rows / min(values) for name, values in seconds.items()}


def read(lake: Lake, settings: Settings) -> Iterator[pa.Table]:
    """The payload of all files."""
    for path in sorted(Path(lake.table_uri(EXPERIENCE.name)).rglob("*.parquet")):
        with pq.ParquetFile(path) as file:
            present = set(file.schema_arrow.names)
            yield file.read([name for name in columns(settings) if name in present])


def _read_all(lake: Lake, settings: Settings) -> int:
    return sum(table.num_rows for table in read(lake, settings))


def plain(lake: Lake, settings: Settings) -> int:
    """Tensors of the rows as they lie: padded ids and masks, logprobs and advantages of the action tokens."""
    rows = 0
    for table in read(lake, settings):
        for start in range(0, table.num_rows, BATCH):
            batch = table.slice(start, BATCH)
            tokens = Tokens.of(batch)
            outcomes = batch["reward"].to_numpy() - batch["group_reward_mean"].to_numpy()
            for part in np.array_split(np.argsort(tokens.lengths, kind="stable"), PARTS):
                spans = [slice(*tokens.offsets[i : i + 2]) for i in part]
                ids, mask, behavior = (
                    pad_sequence([torch.from_numpy(column[span]) for span in spans], batch_first=True)
                    for column in (tokens.token_ids, tokens.action_mask, tokens.behavior_logprobs)
                )
                advantages = torch.from_numpy(outcomes[part])[:, None].expand_as(mask)
                rows += len((ids, mask[:, 1:], behavior[mask], advantages[mask])[0])
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
    ratio, beside_plain = (figures["assembly"] / figures[name] for name in ("parquet", "plain"))
    print(f"{'':28}{'trajectories/s':>16}{'batches/s':>12}")
    for name, label in (
        ("parquet", "bare Parquet read"),
        ("plain", "plain loader"),
        ("assembly", "batches of tensors"),
    ):
        print(f"{label:28}{figures[name]:16,.0f}{figures[name] / BATCH:12.1f}")
    print(
        f"{'ratio to the bare read':28}{ratio:16.2f}   (128 trajectories of about {options.tokens} tokens, one thread)"
    )
    print(f"{'ratio to the plain loader':28}{beside_plain:16.2f}")
    line = {
        "name": "batch assembly",
        "value": round(figures["assembly"]),
        "unit": "trajectories/s",
        "reference": round(figures["parquet"]),
        "ratio": round(ratio, 3),
        "ratio_to_plain_loader": round(beside_plain, 3),
    }
    keep(options.out, line)


if __name__ == "__main__":
    main()
