"""Run by test_engine.py on one or more ranks: what real DeepSpeed makes of one batch, by ZeRO stage and split."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from schemas.settings import Settings, load
from trainers.batches import Tokens, num_action_tokens, rank_batches
from trainers.engine import Engine
from trainers.metrics import summarize
from trainers.ranks import Ranks, prepare_environment

LEARNING_RATE = 1e-2
SPLITS = [(0, 1), (0, 2), (0, 4), (1, 1), (1, 2), (1, 4), (2, 2), (3, 2)]


def settings_of(stage: int, parts: int, batch: int) -> Settings:
    options = {"learner.zero_stage": stage, "learner.micro_batches": parts, "loop.batch_size": batch}
    options |= {"loop.group_size": 1, "learner.kl": 0.0, "learner.max_grad_norm": 1e6}
    return load(overrides=[f"--{name}={value}" for name, value in options.items()])


def table(rows: list[tuple[list[int], list[bool], list[float]]]) -> Tokens:
    ids, masks, behavior = zip(*rows, strict=True)
    columns = {
        "token_ids": pa.array(ids, pa.list_(pa.int32())),
        "action_mask": pa.array(masks, pa.list_(pa.bool_())),
        "behavior_logprobs": pa.array(behavior, pa.list_(pa.float32())),
    }
    return Tokens.of(pa.table(columns))


def uneven() -> tuple[Tokens, np.ndarray]:
    """Eight rows of very different lengths, with advantages of both signs."""
    random = np.random.default_rng(0)
    rows = []
    for length in (2, 3, 4, 6, 9, 14, 20, 30):
        mask = [False, *(random.random(length - 1) < 0.7).tolist()]
        rows.append((random.integers(0, 304, length).tolist(), mask, np.where(mask, -5.5, 0.0).tolist()))
    return table(rows), random.normal(size=8)


def figures(ranks: Ranks, policy: Path, stage: int, parts: int) -> dict[str, object]:
    """Loss, gradient norm and weights after one step."""
    tokens, advantages = uneven()
    engine = Engine(settings_of(stage, parts, len(advantages)), ranks, policy)
    total = int(num_action_tokens(tokens).sum())
    batches = rank_batches(tokens, advantages, engine.parts, ranks.rank, ranks.size)
    sums, norm = engine.train_step(batches, len(advantages), total, LEARNING_RATE)
    weights = {name: float(x.double().sum()) for name, x in engine.tensors().items()}
    logprobs = engine.probe().logprobs
    engine.close()
    return {
        "stage": stage,
        "parts": parts,
        "loss": summarize(sums)[0].loss,
        "norm": norm,
        "weights": weights,
        "probe": logprobs,
    }


def main(policy: str, out: str) -> None:
    """Write the figures of all splits to `out`."""
    prepare_environment()
    ranks = Ranks()
    found = [figures(ranks, Path(policy), stage, parts) for stage, parts in SPLITS]
    if ranks.rank == 0:
        Path(out).write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
