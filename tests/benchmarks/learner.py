"""A learner's step beside bare DeepSpeed: the same model, batch and configuration, all on one thread.

OMP_NUM_THREADS=1 python -m tests.benchmarks.learner [--policy DIR] [--rows N] [--median N] [--steps N] [--out FILE]

The learner's step goes from rows of the lake to new weights: credit, micro-batches of tensors, objective, metrics,
forward, backward, optimizer. The bare one gets the same tensors, positions of packed rows among them, and has the
plainest loss, minus the sum of advantage times logprob. Then a learner's stream on a real lake that holds data: how
long it waits. Steps take turns, figures are of median steps, all but the waiting in time of this process, in which
other processes have no part.
Aimed at: bare / learner 0.95 or more, credit and objective 3 % of a step or less, waiting below 1 %.
"""

import argparse
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from infra.lake import Lake
from schemas.settings import Settings, load
from tests.benchmarks.lines import keep
from tests.experience import Sample, action_tokens, experience
from tests.policies import VOCABULARY, write_policy
from trainers.batches import MicroBatch, Split
from trainers.credit import Turns
from trainers.engine import Engine, deepspeed_config
from trainers.metrics import trajectory_sums
from trainers.objectives import evaluate
from trainers.objectives.aggregate import AGGREGATIONS
from trainers.policy import Scorer, load_policy
from trainers.ranks import Ranks, prepare_environment
from trainers.signals import Signals, share_of, signals
from trainers.stream import Batch, ExperienceStream

RATE = 1e-4
SPLITS = {
    "padded, 4 micro-batches": Split(4),
    "packed, 4 micro-batches": Split(4, packing=True),
    "padded, at most 4,096 tokens": Split(1, 4096),
    "packed, at most 4,096 tokens": Split(1, 4096, True),
}


def main() -> None:
    """Measure, print, append lines to `--out`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", type=Path, help="a Hugging Face folder; without it one of the demo's shape")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--median", type=float, default=90, help="tokens of a trajectory; the demo's have about 35")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepare_environment()
    pa.set_cpu_count(1)
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as folder:
        policy = options.policy or write_policy(Path(folder) / "policy")
        settings = load(overrides=[f"--policy.path={policy}", f"--loop.batch_size={options.rows}", "--objective.kl=0"])
        lake = Lake(f"{folder}/lake")
        lake.ensure()
        for sequence in range(1, options.steps + 1):
            lake.append(
                "experience", experience(samples(options.rows, options.median, sequence)), "benchmark", sequence
            )
        lines = [*compare(settings, ranks, lake, options.steps), waiting(settings, ranks, lake)]
    ranks.close()
    for each in lines:
        print(f"{each['name']:40}{each['value']:>12,} {each['unit']:12}{each['ratio']:8.3f}")
    keep(options.out, *lines)


def samples(rows: int, median: float, seed: int) -> Iterator[Sample]:
    """Trajectories of a long tail, 18 to 480 tokens, about a third of them actions; groups of 16."""
    random = np.random.default_rng(seed)
    for i in range(rows):
        length = int(np.clip(random.lognormal(np.log(median), 0.6), 18, 480))
        mask = np.arange(length) % 24 >= 16
        logprobs = np.where(mask, -random.exponential(size=length), 0.0).tolist()
        ids, reward = random.integers(0, VOCABULARY, length).tolist(), float(random.random() < 0.4)
        turns = [(start + 16, min(start + 24, length), 0.0) for start in range(0, length - 16, 24)]
        name, group = f"{seed}/{i}", f"{seed}/{i // 16}"
        yield Sample(name, 1, reward, 0.4, 0.5, group, random.random(), ids, mask.tolist(), logprobs, turns=turns)


def compare(settings: Settings, ranks: Ranks, lake: Lake, steps: int) -> Iterator[dict[str, Any]]:
    """The learner's step, what of it is credit, assembly and objective, the bare step, and the splits."""
    stream = ExperienceStream(lake, settings)
    stream.poll(1)
    if (batch := stream.take(1)) is None:
        raise RuntimeError("the lake holds no batch")
    engine, bare = Engine(settings, ranks, Path(settings.policy.path)), Bare(settings, ranks)
    made, parts = assembled(batch, settings, engine.split)
    total = sum(len(part.turns) for part in parts)

    def step(split: Split) -> None:
        made, parts = assembled(batch, settings, split)
        engine.train_step(parts, made, total, RATE, settings.objective.kl)

    works: dict[str, Callable[[], object]] = {
        "bare": lambda: bare.step(parts, total),
        "learner": lambda: step(engine.split),
        "credit": lambda: credit(batch, settings),
        "assembly": lambda: list(share_of(batch.tokens, made, engine.split, 0, 1)),
        "objective": lambda: [objective(part, settings) for part in parts],
    }
    works |= {name: (lambda split=split: step(split)) for name, split in SPLITS.items()}
    seconds = medians(works, steps)
    tokens, learner = len(batch.tokens.token_ids), seconds["learner"]
    yield line("learner step", tokens / learner, "tokens/s", seconds["bare"] / learner)
    for name in ("credit", "assembly", "objective"):
        yield line(f"of it {name}", 1000 * seconds[name], "ms", seconds[name] / learner)
    for name in SPLITS:
        yield line(name, tokens / seconds[name], "tokens/s", learner / seconds[name])
    engine.close()
    bare.engine.destroy()


class Bare:
    """DeepSpeed with the learner's model and configuration, and nothing of the learner."""

    def __init__(self, settings: Settings, ranks: Ranks):
        deepspeed: Any = importlib.import_module("deepspeed")
        scorer = Scorer(load_policy(Path(settings.policy.path)), settings.rollout.temperature)
        config = deepspeed_config(settings, settings.learner.micro_batches, ranks.size)
        self.engine: Any = deepspeed.initialize(
            model=scorer, model_parameters=list(scorer.parameters()), config=config, dist_init_required=False
        )[0]

    def step(self, parts: list[MicroBatch], num_tokens: int) -> None:
        """Forward, backward, optimizer."""
        for part in parts:
            logprobs = self.engine(part.token_ids, part.action_mask, position_ids=part.position_ids)
            self.engine.backward(-(logprobs * part.advantages).sum() / num_tokens, scale_wrt_gas=False)
            self.engine.step()


def credit(batch: Batch, settings: Settings) -> Signals:
    """What each turn of a batch is worth."""
    return signals(batch.rows, batch.tokens, Turns.of(batch.rows, batch.tokens), settings)


def assembled(batch: Batch, settings: Settings, split: Split) -> tuple[Signals, list[MicroBatch]]:
    """Credit and tensors of a batch."""
    made = credit(batch, settings)
    return made, list(share_of(batch.tokens, made, split, 0, 1))


def objective(part: MicroBatch, settings: Settings) -> None:
    """The loss of a micro-batch with made-up logprobs, its gradient by them, and the metrics."""
    tokens = action_tokens(part, (part.behavior_logprobs + 0.01).requires_grad_())
    terms = evaluate(tokens, AGGREGATIONS["token"](tokens, 1, 1, 1), settings.objective, 0.0)
    terms.loss.sum().backward()
    trajectory_sums(terms, tokens)


def waiting(settings: Settings, ranks: Ranks, lake: Lake) -> dict[str, Any]:
    """Seconds between a step's end and the next one's beginning, while there are data, as a share of all."""
    stream, engine = ExperienceStream(lake, settings), Engine(settings, ranks, Path(settings.policy.path))
    waited, busy = list[float](), list[float]()
    while True:
        began = time.perf_counter()
        stream.poll(1)
        if (batch := stream.take(1)) is None:
            break
        drawn = time.perf_counter()
        made, parts = assembled(batch, settings, engine.split)
        engine.train_step(parts, made, sum(len(part.turns) for part in parts), RATE, settings.objective.kl)
        waited.append(drawn - began)
        busy.append(time.perf_counter() - drawn)
    engine.close()
    wait = statistics.median(waited)
    return line("waiting for a batch while data exist", 1000 * wait, "ms", wait / (wait + statistics.median(busy)))


def medians(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """This process's seconds of each, the median of `rounds` that take turns; a first one does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            began = time.process_time()
            work()
            seconds[name].append(time.process_time() - began)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def line(name: str, value: float, unit: str, ratio: float) -> dict[str, Any]:
    """A line of `--out`."""
    return {"name": name, "value": round(value, 1), "unit": unit, "ratio": round(ratio, 4)}


if __name__ == "__main__":
    main()
