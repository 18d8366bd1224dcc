"""A tiny policy that half knows a few tasks of environments that people know: what training can sharpen in seconds.

Each task is shown with its right answer and with a wrong one, as often, through the environment's own prompt.

    PYTHONPATH=tests/tasksets python -m tests.warm_policy DIR      # and a file of settings, in DIR
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from inference.environments.humaneval import problems
from inference.environments.reasoning_gym import build, generate
from inference.tokenizer import END, ChatTokenizer, make_tokenizer, save_tokenizer
from schemas.settings import Family, Settings
from schemas.trajectory import Trajectory
from tests.episodes import engine, episode, task
from trainers.warm_start import DEMONSTRATIONS, warm_start

WORDS = ["sea", "lake", "moon", "star", "fish", "boat"]
SUMS: dict[str, Any] = {
    "dataset": "chain_sum",
    "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
FAMILIES: tuple[dict[str, Any], ...] = (
    {"name": "humaneval", "environment": "humaneval", "num_tasks": 4, "weight": 2.0},
    {"name": "sums", "environment": "reasoning-gym", "num_tasks": 6, "options": SUMS},
    {
        "name": "letters",
        "environment": "verifiers",
        "num_tasks": len(WORDS),
        "options": {"env": {"taskset": {"id": "vf-letters", "words": WORDS}}},
    },
)
SHORT = {0: "    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])\n"}
"""Solutions of HumanEval that take fewer tokens than the canonical ones."""
WARM = {"warm_start_batch": 13, "warm_start_steps": 100, "warm_start_learning_rate": 4e-3}
SETTINGS: dict[str, Any] = {
    "families": FAMILIES,
    "loop": {"group_size": 4, "batch_size": 24},
    "curate": {"group_timeout_s": 30, "epoch_s": 0.5},
    "dispatch": {"lease_s": 60},
    "rollout": {"max_episodes": 48, "max_turn_tokens": 160, "max_tokens": 512, "pack_linger_s": 0.2},
    "learner": {"learning_rate": 1e-4, "sync_interval_start": 1, "sync_interval": 2, "num_train_steps": 12},
    "evaluator": {"samples_per_family": 4, "full_samples_per_family": 4},
}
"""On top of the defaults. A task of each family is held out, and none of the policy's demonstrations shows it."""


def answers(family: Family, index: int) -> tuple[str, str]:
    """A right answer to a task, and a wrong one."""
    if family.name == "humaneval":
        return SHORT.get(index) or problems()[index]["canonical_solution"], "    return None"
    if family.name == "letters":
        return WORDS[index][::-1], WORDS[index]
    made: Any = build(family.name, index, 0, family.options)
    right = generate(SUMS["dataset"], SUMS["config"], made.task_seed)[1]["answer"]
    return f"<answer>{right}</answer>", "<answer>none</answer>"


def shown(families: tuple[Family, ...]) -> Iterator[Trajectory]:
    """Every task that is not held out, played with its right answer and with the wrong one, families in turn."""
    for index in range(max(family.num_train for family in families)):
        for family in (f for f in families if index < f.num_train):
            for answer in answers(family, index):
                of = task(family.environment, family.name, index, **family.options)
                yield asyncio.run(episode(of, engine(answer)))


def write_warm_policy(folder: Path, rows: Sequence[Trajectory]) -> Path:
    """A policy that was warmed up on the single turns `rows`, and their tokenizer; returns its folder in `folder`."""
    demonstrations, policy = folder / "demonstrations", folder / "policy"
    demonstrations.mkdir(parents=True)
    save_tokenizer(make_tokenizer(m["content"] for row in rows for m in row.messages), demonstrations)
    tokenizer = ChatTokenizer.load(demonstrations)
    pairs = [(tokenizer.prompt(r.messages[:-1]), tokenizer.encode(r.messages[-1]["content"] + END)) for r in rows]
    table = pa.table(
        {
            "token_ids": pa.array([[*p, *a] for p, a in pairs], pa.list_(pa.int32())),
            "action_mask": [[False] * len(p) + [True] * len(a) for p, a in pairs],
            "behavior_logprobs": pa.array([[0.0] * (len(p) + len(a)) for p, a in pairs], pa.list_(pa.float32())),
        }
    )
    with pa.ipc.new_file(str(demonstrations / DEMONSTRATIONS), table.schema) as writer:
        writer.write_table(table)
    warm_start(Settings.model_validate({"policy": WARM}), demonstrations, policy)
    return policy


def main(folder: Path) -> None:
    """The command."""
    families = Settings.model_validate(SETTINGS).families
    policy = write_warm_policy(folder, [*shown(families)])
    (folder / "settings.json").write_text(json.dumps(SETTINGS | {"policy": {"path": str(policy.absolute())}}, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
