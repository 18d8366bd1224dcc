"""One-shot: the tiny starting policy, warmed up on scripted demonstrations.

    python -m trainers.warm_start --demonstrations DIR --out DIR [--config FILE ...] [--section.key=value ...]

Reads `demonstrations.arrow` and the tokenizer in the first folder and writes a Hugging Face folder. 800 steps of 64
demonstrations take less than a minute on one core.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer
from torch import nn

from schemas.errors import LagoonError, SettingsError
from schemas.settings import Policy, Settings, current, load
from trainers.batches import Tokens, micro_batches, num_action_tokens
from trainers.policy import Scorer, save_policy, tiny_llama

DEMONSTRATIONS = "demonstrations.arrow"
WARMUP_STEPS = 20
PARTS = 3
"""Micro-batches of a step: fewer pad more, more cost more calls."""

_PROGRESS = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainers.warm_start", allow_abbrev=False)
    parser.add_argument("--demonstrations", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="TOML or JSON, left to right")
    known, rest = parser.parse_known_args(arguments)
    try:
        settings = load(known.config, rest) if known.config else current(overrides=rest)
        warm_start(settings, known.demonstrations, known.out)
    except LagoonError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def warm_start(settings: Settings, demonstrations: Path, out: Path) -> float:
    """Train a new tiny policy on the demonstrations in a folder, write it to `out`; returns the last loss, in nats.

    Raises:
        SettingsError: no demonstrations or no tokenizer there.
    """
    rows = read(demonstrations / DEMONSTRATIONS)
    vocabulary, stop_id, pad_id = token_ids(demonstrations)
    torch.set_num_threads(settings.learner.threads)
    model = tiny_llama(settings.policy, vocabulary, stop_id, pad_id, settings.run.seed)
    loss = imitate(Scorer(model), rows, settings.policy)
    save_policy(model, demonstrations, out, stop_id, pad_id)
    return loss


def imitate(scorer: Scorer, rows: Tokens, policy: Policy) -> float:
    """Maximize the likelihood of the action tokens of `rows`, in order; returns the last step's loss per token."""
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    began, loss = time.monotonic(), 0.0
    for step, batch in enumerate(_batches(rows, policy.warm_start_batch, policy.warm_start_steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(policy, step)
        loss = _step(scorer, batch)
        nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % _PROGRESS == _PROGRESS - 1 or step == policy.warm_start_steps - 1:
            _say(f"warm start: step {step + 1}/{policy.warm_start_steps}, loss {loss:.3f}", began)
    return loss


def learning_rate(policy: Policy, step: int) -> float:
    """Linear warm-up over WARMUP_STEPS, then linear decay to a tenth."""
    return (
        policy.warm_start_learning_rate
        * min(1.0, (step + 1) / WARMUP_STEPS)
        * (1 - 0.9 * step / policy.warm_start_steps)
    )


def read(path: Path) -> Tokens:
    """The token columns of an Arrow IPC file of trajectories.

    Raises:
        SettingsError: there is none, or it is empty.
    """
    try:
        with pa.memory_map(str(path)) as source:
            rows = pa.ipc.open_file(source).read_all().select(["token_ids", "action_mask", "behavior_logprobs"])
    except (OSError, pa.ArrowException) as error:
        raise SettingsError(
            f"no demonstrations in {path}: {error}; make them with `python -m inference.demonstrate`"
        ) from error
    if not rows.num_rows:
        raise SettingsError(f"{path} holds no demonstrations; raise policy.warm_start_steps")
    return Tokens.of(rows)


def token_ids(folder: Path) -> tuple[int, int, int]:
    """Vocabulary size, the token that ends an action, and the padding token, of the tokenizer in `folder`.

    Raises:
        SettingsError: it is missing, or lacks one of these tokens.
    """
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        stop, pad = (tokenizer.token_to_id(config[name]) for name in ("eos_token", "pad_token"))
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise SettingsError(f"no tokenizer in {folder}: {type(error).__name__}: {error}") from error
    if stop is None or pad is None:
        raise SettingsError(f"the tokenizer in {folder} lacks {config['eos_token']} or {config['pad_token']}")
    return tokenizer.get_vocab_size(), stop, pad


def _batches(rows: Tokens, size: int, steps: int) -> Iterator[Tokens]:
    """`steps` batches of `size` rows in order, beginning again at the end."""
    count = len(rows.lengths)
    for step in range(steps):
        yield rows.take([(step * size + i) % count for i in range(size)])


def _step(scorer: Scorer, rows: Tokens) -> float:
    """Gradients of the mean loss over the action tokens of `rows`; returns that loss."""
    num_tokens, total = int(num_action_tokens(rows).sum()), 0.0
    for batch in micro_batches(rows, np.zeros(len(rows.token_ids), np.float32), PARTS):
        loss = -scorer(batch.token_ids, batch.action_mask).sum() / num_tokens
        loss.backward()
        total += loss.item()
    return total


def _say(text: str, began: float) -> None:
    sys.stdout.write(f"{text}, {time.monotonic() - began:.0f} s\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
