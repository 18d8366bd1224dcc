"""Run by test_engine.py on one or more ranks: what real DeepSpeed makes of one batch, by ZeRO stage and split."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from infra.weight_adapters import makes
from schemas.settings import Settings, load
from tests.experience import table
from trainers.batches import Tokens, num_action_tokens
from trainers.credit import Evidence, Turns
from trainers.engine import Engine, Trained
from trainers.metrics import summarize
from trainers.policy import Scorer, export, load_policy
from trainers.ranks import Ranks, prepare_environment
from trainers.signals import Signals, share_of

LEARNING_RATE = 1e-2
STEPS, MORE_STEPS = 3, 2
VALUE, LORA = "value", "lora"
PARTS = {number: {"packing": False, "micro_batches": number} for number in (1, 2, 4)}
PACKED = {"packing": True, "micro_batches": 2}
RECOMPUTED = {"activation_checkpointing": True, **PARTS[2]}
OFFLOADED = {"offload_optimizer": True, "packing": False, "micro_batch_tokens": 40}
BY_TOKENS = {"packing": True, "micro_batch_tokens": 40}
SAVED = ("grpo", PARTS[2])
SPLITS: list[tuple[str, int, Mapping[str, object]]] = [
    *(("grpo", stage, PARTS[parts]) for stage, parts in ((0, 1), (0, 4), (1, 1), (1, 2), (2, 2), (3, 2))),
    *(("grpo", stage, split) for stage, split in ((0, BY_TOKENS), (1, PACKED), (2, BY_TOKENS), (3, BY_TOKENS))),
    *(("grpo", stage, split) for split in (RECOMPUTED, OFFLOADED) for stage in (1, 3)),
    *((name, 1, split) for name in ("ppo", "gspo", "dpo") for split in (PARTS[1], PARTS[4])),
    *((LORA, stage, split) for stage, split in ((0, PARTS[1]), (1, PARTS[2]), (2, BY_TOKENS), (3, PARTS[2]))),
    *((VALUE, stage, split) for stage, split in ((1, PARTS[1]), (0, PARTS[4]), (1, BY_TOKENS), (3, PARTS[2]))),
]


def settings_of(objective: str, stage: int, split: Mapping[str, object], policy: Path) -> Settings:
    """Everything that depends on the whole batch is on for all but the plain objective."""
    options = {"learner.zero_stage": stage, "loop.batch_size": 8}
    options |= {f"learner.{name}": value for name, value in split.items()}
    name, baseline = (objective, "group") if objective not in {VALUE, LORA} else ("grpo", "value")
    if objective == LORA:
        baseline, options = "group", options | {"learner.lora_rank": 4}
    options |= {"loop.group_size": 1, "objective.name": name, "policy.path": policy, "learner.max_grad_norm": 1e6}
    options |= {"credit.baseline": baseline, "credit.value_learning_rate": 1e-5}  # the policy's: equal rates
    more = {"objective.kl": 0.1, "objective.aggregation": "sequence", "objective.negative_shift": 0.5}
    options |= {"objective.kl": 0.0} if objective == "grpo" else more
    return load(overrides=[f"--{name}={value}" for name, value in options.items()])


def uneven() -> tuple[Tokens, np.ndarray]:
    """Eight rows of very different lengths, with advantages of both signs."""
    random = np.random.default_rng(0)
    rows = []
    for length in (2, 3, 4, 6, 9, 14, 20, 30):
        mask = [False, *(random.random(length - 1) < 0.7).tolist()]
        rows.append((random.integers(0, 304, length).tolist(), mask, np.where(mask, -5.5, 0.0).tolist()))
    return table(rows), random.normal(size=8)


def signals_of(tokens: Tokens, advantages: np.ndarray) -> Signals:
    """Two pairs that no micro-batch of two rows holds together, and successes of both ends of the lengths."""
    successes = np.where(np.isin(np.arange(8), (0, 7)), 2.0, 0.0).astype(np.float32)
    turns = Turns.of(pa.table({}), tokens)
    kept, best, worst = np.ones(8, np.bool_), np.array([0, 6]), np.array([7, 1])
    return Signals(turns, advantages[turns.owners], kept, successes, best, worst)


def judged(signals: Signals, outcomes: np.ndarray) -> Signals:
    """The same with what a value head judges by: some rows are cut off, one is not learned from."""
    turns, size = signals.turns, len(outcomes)
    process = np.cos(np.arange(len(turns.starts)))
    nothing, groups, truncated = np.zeros(size), np.zeros(size, np.int64), np.arange(size) % 3 == 0
    evidence = Evidence(turns, outcomes, nothing, nothing, nothing, groups, process, truncated)
    return replace(signals, evidence=evidence, kept=np.arange(size) != 4)


def figures(
    ranks: Ranks, policy: Path, objective: str, stage: int, split: Mapping[str, object], out: Path
) -> dict[str, object]:
    """Losses of some steps and what the last of them left; a checkpoint of it for SAVED."""
    engine, step = course(ranks, policy, objective, stage, split)
    base = out / f"base-{stage}-{ranks.size}"
    if objective == LORA:
        whole(ranks, engine, policy, base)
    trained = [step() for _ in range(STEPS)]
    turns = trained[-1].turns
    weights = restored = sums(engine)
    more: dict[str, object] = {}
    if (objective, split) == SAVED:
        engine.save(out / f"{stage}-{ranks.size}")
    if objective == LORA:
        more = published(ranks, engine, policy, base)
        engine.save(out / f"lora-{stage}-{ranks.size}")
        engine.close()
        engine, step = course(ranks, policy, objective, stage, split)
        engine.restore(out / f"lora-{stage}-{ranks.size}", ranks.size)
        restored = sums(engine)
        more |= {"more_losses": [summarize(step().sums)[0].loss for _ in range(MORE_STEPS)]}
    engine.close()
    return {
        "objective": objective,
        "stage": stage,
        "split": split,
        "losses": [summarize(step.sums)[0].loss for step in trained],
        "norms": [step.grad_norm for step in trained],
        "advantages": turns.advantages.tolist(),
        "values": None if turns.values is None else turns.values.tolist(),
        "weights": weights,
        "restored": restored,
        **more,
    }


def whole(ranks: Ranks, engine: Engine, policy: Path, into: Path) -> Mapping[str, torch.Tensor]:
    """The weights as they are published; rank 0 writes them to folder `into`."""
    tensors = engine.tensors()
    if ranks.rank == 0:
        export(engine.model, tensors, policy, into)
    return tensors


def published(ranks: Ranks, engine: Engine, policy: Path, base: Path) -> dict[str, object]:
    """Whether adapters merged into what `base` holds are what is published, and how far the probe is off that."""
    new, file = base.with_suffix(".new"), base.with_suffix(".adapters.safetensors")
    probe = engine.probe(whole(ranks, engine, policy, new))
    engine.write_adapters(file)
    if ranks.rank:
        return {}
    ids = torch.tensor([probe.token_ids])
    with torch.no_grad():
        logprobs = Scorer(load_policy(new))(ids, torch.ones_like(ids[:, 1:], dtype=torch.bool))
    off = float((logprobs - torch.tensor(probe.logprobs)).abs().max())
    name = "model.safetensors"
    return {"is_exact": makes(base / name, file, new / name), "probe_off": off}


def sums(engine: Engine) -> dict[str, float]:
    """Of the weights as they are published, by name."""
    return {name: float(x.double().sum()) for name, x in engine.tensors().items()}


def course(
    ranks: Ranks, policy: Path, objective: str, stage: int, split: Mapping[str, object]
) -> tuple[Engine, Callable[[], Trained]]:
    """An engine, and its next step on the one batch."""
    tokens, advantages = uneven()
    settings = settings_of(objective, stage, split, policy)
    engine = Engine(settings, ranks, policy)
    total, signals = int(num_action_tokens(tokens).sum()), signals_of(tokens, advantages)
    signals = judged(signals, advantages) if objective == VALUE else signals
    batches = list(share_of(tokens, signals, engine.split, ranks.rank, ranks.size))
    return engine, lambda: engine.train_step(batches, signals, total, LEARNING_RATE, settings.objective.kl)


def resumed(ranks: Ranks, policy: Path, objective: str, stage: int, before: int, out: Path) -> dict[str, object]:
    """Losses of the steps that follow those that `before` ranks have saved."""
    engine, step = course(ranks, policy, objective, stage, SAVED[1])
    prefix = "lora-" if objective == LORA else ""
    is_whole = engine.restore(out / f"{prefix}{stage}-{before}", before)
    losses = [summarize(step().sums)[0].loss for _ in range(MORE_STEPS)]
    engine.close()
    return {"objective": objective, "stage": stage, "before": before, "is_whole": is_whole, "losses": losses}


def main(policy: str, folder: str, before: str) -> None:
    """Write figures of all splits and checkpoints, unless more ranks have, and what becomes of others' checkpoints."""
    prepare_environment()
    ranks, out = Ranks(), Path(folder)
    if ranks.size > int(before):
        found = [figures(ranks, Path(policy), *split, out) for split in SPLITS]
        if ranks.rank == 0:
            (out / f"figures-{ranks.size}.json").write_text(json.dumps(found))
    if int(before):
        saved = [(objective, stage) for objective in (SAVED[0], LORA) for stage in (1, 2, 3)]
        after = [resumed(ranks, Path(policy), *each, int(before), out) for each in saved]
        if ranks.rank == 0:
            (out / f"resumed-{ranks.size}.json").write_text(json.dumps(after))
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
