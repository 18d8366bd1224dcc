"""Real DeepSpeed gives the gradient of the global batch: whatever the ZeRO stage, accumulation steps and ranks."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.experience import spread, table, terms_of
from tests.integration import engine_figures
from tests.policies import write_policy
from trainers.batches import micro_batches, num_action_tokens
from trainers.policy import Scorer, load_policy

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1, mlp=32)


@pytest.fixture(scope="module")
def runs(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank made, then two, who also took up its checkpoints, then one that took up those of the two."""
    out = tmp_path_factory.mktemp("runs")
    for num_ranks, before in ((1, 0), (2, 1), (1, 2)):
        many = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
        arguments = ["-m", "tests.integration.engine_figures", str(policy), str(out), str(before)]
        done = subprocess.run(
            [sys.executable, *(many if num_ranks > 1 else []), *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    return out


def by_hand(policy: Path) -> tuple[list[float], list[float], list[dict[str, float]]]:
    """Loss, gradient norm, and sums of the weights after each AdamW step of plain torch on the whole batch."""
    tokens, advantages = engine_figures.uneven()
    scorer = Scorer(load_policy(policy))
    rate, losses, norms, weights = engine_figures.LEARNING_RATE, list[float](), list[float](), list[dict[str, float]]()
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    (batch,) = micro_batches(tokens, spread(advantages, tokens), 1)
    for _ in range(engine_figures.STEPS + engine_figures.MORE_STEPS):
        optimizer.zero_grad()
        logprobs = scorer(batch.token_ids, batch.action_mask)
        loss = terms_of(batch, logprobs).loss.sum() / int(num_action_tokens(tokens).sum())
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in scorer.parameters() if p.grad is not None]).item())
        optimizer.step()
        weights.append({name: x.double().sum().item() for name, x in scorer.model.state_dict().items()})
    return losses, norms, weights


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_all_zero_stages_ranks_and_splits_give_the_curve_of_plain_torch_on_the_whole_batch(
    policy: Path, runs: Path, num_ranks: int
) -> None:
    steps = engine_figures.STEPS
    losses, norms, weights = by_hand(policy)
    assert losses[steps - 1] < losses[0] - 0.01
    figures = json.loads((runs / f"figures-{num_ranks}.json").read_text())
    assert len(figures) == len(engine_figures.SPLITS)
    for found in (x for x in figures if x["objective"] == "grpo"):
        where = f"ZeRO {found['stage']}, {found['split']}, {num_ranks} ranks"
        assert found["losses"] == pytest.approx(losses[:steps], rel=1e-4, abs=1e-6), where
        assert found["losses"][0] == pytest.approx(losses[0], rel=1e-6), where
        assert found["norms"] == pytest.approx(norms[:steps], rel=1e-4), where
        assert found["norms"][0] == pytest.approx(norms[0], rel=1e-6), where
        assert found["weights"] == pytest.approx(weights[steps - 1], rel=1e-3, abs=4e-3), where
    for name in {x["objective"] for x in figures}:
        one, *splits = (x for x in figures if x["objective"] == name)
        assert all(x["norms"] == pytest.approx(one["norms"], rel=1e-3) for x in splits), name
        assert all(x["losses"] == pytest.approx(one["losses"], rel=1e-3, abs=1e-5) for x in splits), name
        assert one["norms"][0] > 0, name
    judged = [x for x in figures if x["objective"] == engine_figures.VALUE]
    assert all(x["values"] == pytest.approx(judged[0]["values"], rel=1e-4, abs=1e-5) for x in judged)
    assert all(x["advantages"] == pytest.approx(judged[0]["advantages"], rel=1e-4, abs=1e-5) for x in judged)
    assert np.std(judged[0]["values"]) > 0.01  # it has begun to tell turns apart
    assert not any("value" in name for name in judged[0]["weights"])  # a published policy has no value head


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_adapters_are_published_merged_and_come_back_from_a_checkpoint(
    policy: Path, runs: Path, num_ranks: int
) -> None:
    start = {name: x.double().sum().item() for name, x in load_policy(policy).state_dict().items()}
    figures = json.loads((runs / f"figures-{num_ranks}.json").read_text())
    found = [x for x in figures if x["objective"] == engine_figures.LORA]
    assert [x["stage"] for x in found] == [0, 1, 2, 3]
    for each in found:
        assert each["weights"].keys() == start.keys()
        moved = {name for name, x in each["weights"].items() if x != start[name]}
        assert moved == {name for name in start if "_proj" in name}
        assert each["restored"] == each["weights"]
        assert each["is_exact"], f"ZeRO {each['stage']}"  # what readers make of the base and the adapters
        assert each["probe_off"] <= 1e-5, f"ZeRO {each['stage']}"
        assert each["weights"] == pytest.approx(found[0]["weights"], rel=1e-3, abs=4e-3)


@pytest.mark.parametrize(("num_ranks", "before"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_weights_and_moments(
    policy: Path, runs: Path, num_ranks: int, before: int
) -> None:
    losses, _, _ = by_hand(policy)
    found = [x for x in _resumed(runs, num_ranks) if x["objective"] != engine_figures.LORA]
    assert [(x["stage"], x["before"], x["is_whole"]) for x in found] == [(s, before, True) for s in (1, 2, 3)]
    for each in found:
        assert each["losses"] == pytest.approx(losses[engine_figures.STEPS :], rel=1e-4), each["stage"]


@pytest.mark.parametrize(("num_ranks", "before"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_adapters_and_their_moments(
    runs: Path, num_ranks: int, before: int
) -> None:
    figures = json.loads((runs / f"figures-{before}.json").read_text())
    alone = {x["stage"]: x["more_losses"] for x in figures if x["objective"] == engine_figures.LORA}
    found = [x for x in _resumed(runs, num_ranks) if x["objective"] == engine_figures.LORA]
    assert [(x["stage"], x["before"], x["is_whole"]) for x in found] == [(s, before, True) for s in (1, 2, 3)]
    for each in found:
        assert each["losses"] == pytest.approx(alone[each["stage"]], rel=1e-4, abs=1e-6), each["stage"]


def _resumed(runs: Path, num_ranks: int) -> list[dict[str, Any]]:
    return json.loads((runs / f"resumed-{num_ranks}.json").read_text())


def test_loss_of_uneven_micro_batches_is_not_divided_again(policy: Path) -> None:
    # 1 and 9 action tokens with losses 1 and 0: 0.1 (divided by the steps again 0.05, mean of means 0.5)
    rows = [([1, 2], [False, True], 1), ([3] * 10, [False] + [True] * 9, 9)]
    scorer = Scorer(load_policy(policy))
    advantages, losses = np.array([-1.0, 0.0]), []
    for parts in (1, 2):
        made = [(ids, mask, [0.0] * len(ids)) for ids, mask, _ in rows]
        tokens, loss = table(made), 0.0
        for batch in micro_batches(tokens, spread(advantages, tokens), parts):
            logprobs = scorer(batch.token_ids, batch.action_mask)
            on_policy = replace(batch, behavior_logprobs=logprobs.detach())
            loss += terms_of(on_policy, logprobs).loss.sum().item() / int(num_action_tokens(tokens).sum())
        losses.append(loss)
    assert losses == pytest.approx([0.1, 0.1])
