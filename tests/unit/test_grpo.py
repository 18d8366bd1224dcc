"""GRPO as a function: values by hand, laws of its gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainers.objectives import OBJECTIVES, Terms

LOGPROBS = st.lists(st.floats(-5, -0.0625, width=32), min_size=1, max_size=8)


def grpo(logprobs: Tensor, behavior: Tensor, advantages: Tensor, ref: Tensor | None = None, **options: float) -> Terms:
    settings = {"clip": 0.2, "clip_high": 0.2, "kl": 0.0} | options
    return OBJECTIVES["grpo"](logprobs, behavior, advantages, ref, **settings)


def gradient(logprobs: Tensor, behavior: Tensor, advantages: Tensor, **options: float) -> Tensor:
    logprobs = logprobs.clone().requires_grad_()
    grpo(logprobs, behavior, advantages, **options).loss.sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad


def test_loss_and_clip_by_hand() -> None:
    # ratios 1, 1.5, 1.5, 0.5, 0.5 with advantages 2, 2, -2, -2, 2:
    # min(r A, clip(r) A): 2; min(3, 2.4) = 2.4 clipped; min(-3, -2.4) = -3; min(-1, -1.6) = -1.6 clipped; min(1, 1.6)
    ratios = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0])
    behavior = torch.full((5,), -2.0)
    terms = grpo(behavior + ratios.log(), behavior, advantages)
    assert terms.loss.tolist() == pytest.approx([-2.0, -2.4, 3.0, 1.6, -1.0])
    assert terms.clipped.tolist() == [False, True, False, True, False]
    assert terms.importance_ratio.tolist() == pytest.approx([1.0, 1.5, 1.5, 0.5, 0.5])


def test_a_higher_upper_clip_lets_good_tokens_grow() -> None:
    behavior = torch.tensor([-2.0])
    logprobs = behavior + math.log(1.25)
    assert grpo(logprobs, behavior, torch.ones(1)).loss.item() == pytest.approx(-1.2)
    assert grpo(logprobs, behavior, torch.ones(1), clip_high=0.28).loss.item() == pytest.approx(-1.25)


def test_kl_penalty_by_hand() -> None:
    # policy twice as likely as the reference: d = -log 2, k3 = 1/2 - 1 + log 2 = 0.193147
    ref = torch.tensor([-2.0])
    terms = grpo(ref + math.log(2), ref + math.log(2), torch.zeros(1), ref, kl=0.1)
    assert terms.kl.item() == pytest.approx(0.193147, abs=1e-6)
    assert terms.loss.item() == pytest.approx(0.0193147, abs=1e-6)


@given(LOGPROBS, st.floats(-3, 3, width=32))
def test_ratio_one_gives_the_on_policy_gradient(values: list[float], advantage: float) -> None:
    logprobs = torch.tensor(values)
    advantages = torch.full_like(logprobs, advantage)
    assert torch.allclose(gradient(logprobs, logprobs, advantages), -advantages)


@given(st.floats(0.21, 3), st.floats(0.1, 3))
def test_a_clipped_token_has_no_gradient(excess: float, advantage: float) -> None:
    behavior = torch.tensor([-2.0, -2.0])
    ratios = torch.tensor([1 + excess, max(1 - excess, 1e-3)])
    advantages = torch.tensor([advantage, -advantage])
    assert gradient(behavior + ratios.log(), behavior, advantages).tolist() == [0.0, 0.0]


def test_an_absurd_ratio_stays_finite() -> None:
    terms = grpo(torch.tensor([0.0]), torch.tensor([-1e6]), torch.ones(1), torch.tensor([-1e6]), kl=0.1)
    assert torch.isfinite(terms.loss).all()
    assert torch.isfinite(terms.importance_ratio).all()
