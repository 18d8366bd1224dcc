"""Objectives as functions: values worked by hand, and the laws that all of them keep."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from schemas.settings import Objective
from trainers.objectives import OBJECTIVES, ActionTokens, Terms, evaluate
from trainers.objectives.aggregate import AGGREGATIONS
from trainers.objectives.dpo import preferences
from trainers.objectives.kl import adapted

BEHAVIOR = -2.0
LOGPROBS = st.lists(st.floats(-5, -0.0625, width=32), min_size=1, max_size=8)
POLICY_GRADIENTS = ["grpo", "ppo", "cispo", "gspo", "reinforce"]
OFF_POLICY = {"cispo": {"clip": 1.0, "clip_high": 4.0}}


def tokens(ratios: Sequence[float], advantages: Sequence[float], owners: Sequence[int] = (), **more: object):
    """Action tokens at these importance ratios; one row unless `owners` says otherwise."""
    rows = torch.tensor(owners or [0] * len(ratios))
    behavior = torch.full((len(ratios),), BEHAVIOR)
    logprobs = behavior + torch.tensor(ratios).log()
    return ActionTokens(logprobs, behavior, torch.tensor(advantages), rows, int(rows.max()) + 1, **more)  # pyright: ignore[reportArgumentType]


def terms(found: ActionTokens, **options: object) -> Terms:
    settings = Objective.model_validate({"kl": 0.0} | options)
    num_tokens = len(found.owners)
    weights = AGGREGATIONS[settings.aggregation](found, num_tokens, found.num_rows, 10)
    return evaluate(found, weights, settings, settings.kl)


def gradient(found: ActionTokens, **options: object) -> Tensor:
    """Of the loss, with respect to the logprobs."""
    logprobs = found.logprobs.clone().requires_grad_()
    fields = {name: getattr(found, name) for name in found.__slots__} | {"logprobs": logprobs}
    terms(ActionTokens(**fields), **options).loss.sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad


def test_grpo_by_hand() -> None:
    # min(r A, clip(r) A): 2; min(3, 2.4) = 2.4 clipped; min(-3, -2.4) = -3; min(-1, -1.6) = -1.6 clipped; min(1, 1.6)
    found = terms(tokens([1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, -2.0, 2.0]))
    assert found.loss.tolist() == pytest.approx([-2.0, -2.4, 3.0, 1.6, -1.0])
    assert found.clipped.tolist() == [False, True, False, True, False]
    assert found.importance_ratio.tolist() == pytest.approx([1.0, 1.5, 1.5, 0.5, 0.5])


def test_a_higher_upper_clip_lets_good_tokens_grow() -> None:
    assert terms(tokens([1.25], [1.0])).loss.item() == pytest.approx(-1.2)
    assert terms(tokens([1.25], [1.0]), clip_high=0.28).loss.item() == pytest.approx(-1.25)


@pytest.mark.parametrize(
    ("correction", "weights"),
    [("none", [1, 1, 1]), ("unbounded", [3, 1.5, 0.4]), ("truncate", [2, 1.5, 0.4]), ("mask", [0, 1.5, 0])],
)
def test_reinforce_multiplies_the_score_by_the_corrected_ratio(correction: str, weights: list[float]) -> None:
    # gradient of -w A log pi: -w A, with A 2, 2, -1 and the cap at 2
    found = tokens([3.0, 1.5, 0.4], [2.0, 2.0, -1.0])
    options = {"name": "reinforce", "ratio_correction": correction}
    assert gradient(found, **options).tolist() == pytest.approx(
        [-w * a for w, a in zip(weights, [2, 2, -1], strict=True)]
    )


def test_decoupled_ppo_clips_against_the_proximal_and_weighs_by_proximal_over_behavior() -> None:
    # behavior -2; proximal twice as likely (w = 2); policy 1.5 times the proximal: r = 1.5, clipped at 1.2
    # -w min(r A, 1.2 A) = -2 * 1.2 = -2.4 for A = 1, cut; for A = -1: -2 * min(-1.5, -1.2) = 3.0, not cut
    proximal = torch.full((2,), BEHAVIOR + math.log(2))
    found = terms(tokens([3.0, 3.0], [1.0, -1.0], proximal_logprobs=proximal), name="ppo", ratio_cap=5.0)
    assert found.loss.tolist() == pytest.approx([-2.4, 3.0])
    assert found.clipped.tolist() == [True, False]
    assert found.importance_ratio.tolist() == pytest.approx([3.0, 3.0])  # reported against the sampler, always


def test_a_policy_that_has_not_moved_since_publication_is_never_clipped_by_ppo_however_stale_the_samples() -> None:
    found = tokens([0.25, 4.0], [1.0, -1.0])
    moved = {name: getattr(found, name) for name in found.__slots__} | {"proximal_logprobs": found.logprobs}
    stale = terms(ActionTokens(**moved), name="ppo", ratio_correction="unbounded")
    assert not stale.clipped.any()
    assert stale.loss.tolist() == pytest.approx([-0.25, 4.0])
    assert terms(found).clipped.tolist() == [False, False]


def test_cispo_clips_the_ratio_and_keeps_every_gradient() -> None:
    # clip(r, 0, 5): 8 becomes 5; gradient -clip(r) A
    found = gradient(tokens([8.0, 0.1], [1.0, -1.0]), name="cispo", clip=1.0, clip_high=4.0)
    assert found.tolist() == pytest.approx([-5.0, 0.1])


def test_gspo_has_one_ratio_a_sequence_and_splits_its_gradient_by_the_token() -> None:
    # row 0: ratios 2 and 0.5: mean log 0, s = 1. row 1: 4 and 1: s = 2, clipped at 1.2 for a positive advantage
    found = tokens([2.0, 0.5, 4.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1])
    made = terms(found, name="gspo", clip=0.2)
    assert made.loss.tolist() == pytest.approx([-1.0, -1.0, -1.2, -1.2])
    assert made.clipped.tolist() == [False, False, True, True]
    assert gradient(found, name="gspo", clip=0.2).tolist() == pytest.approx([-1.0, -1.0, 0.0, 0.0])


def test_sft_says_what_successes_said() -> None:
    found = tokens([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0, 0, 1], success_weights=torch.tensor([1.5, 1.5, 0.0]))
    assert gradient(found, name="sft").tolist() == pytest.approx([-1.5, -1.5, 0.0])


def test_dpo_by_hand() -> None:
    # log ratios 0.5 (chosen), -0.5 (rejected), beta 2: margin 2, loss -log sigmoid(2) = 0.126928
    # pull = 2 * sigmoid(-2) = 0.238406 on the chosen, minus that on the rejected, nothing on the third row
    rows, losses = preferences(torch.tensor([0.5, -0.5, 3.0]), torch.tensor([0]), torch.tensor([1]), 2.0)
    assert losses.tolist() == pytest.approx([0.126928], abs=1e-6)
    assert rows.tolist() == pytest.approx([0.238406, -0.238406, 0.0], abs=1e-6)


@given(st.lists(st.floats(-3, 3), min_size=4, max_size=4), st.floats(0.05, 3))
def test_dpos_preferences_are_the_gradient_of_its_loss(values: list[float], beta: float) -> None:
    log_ratios = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    chosen, rejected = torch.tensor([0, 3]), torch.tensor([1, 1])
    rows, losses = preferences(log_ratios, chosen, rejected, beta)
    losses.mean().backward()
    assert log_ratios.grad is not None
    assert torch.allclose(-log_ratios.grad, rows.detach(), atol=1e-12)


def test_a_mixture_is_the_weighted_sum_of_its_parts() -> None:
    found = tokens([1.0, 1.5], [1.0, -1.0], [0, 1], success_weights=torch.tensor([2.0, 0.0]))
    mixed = gradient(found, name="grpo", mixture={"sft": 0.1})
    apart = gradient(found, name="grpo") + 0.1 * gradient(found, name="sft")
    assert torch.allclose(mixed, apart)


@given(LOGPROBS, st.floats(-3, 3, width=32), st.sampled_from(POLICY_GRADIENTS))
def test_ratio_one_gives_the_on_policy_gradient(values: list[float], advantage: float, name: str) -> None:
    logprobs = torch.tensor(values)
    owners = torch.zeros(len(values), dtype=torch.int64)
    found = ActionTokens(
        logprobs, logprobs, torch.full_like(logprobs, advantage), owners, 1, proximal_logprobs=logprobs
    )
    expected = torch.full_like(logprobs, -advantage)
    made = gradient(found, name=name, **OFF_POLICY.get(name, {}))
    total = made.sum() if name == "gspo" else made
    assert torch.allclose(total, expected.sum() if name == "gspo" else expected, rtol=1e-4)


@given(st.floats(0.21, 3), st.floats(0.1, 3))
def test_a_clipped_token_has_no_gradient(excess: float, advantage: float) -> None:
    found = tokens([1 + excess, max(1 - excess, 1e-3)], [advantage, -advantage])
    assert gradient(found).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_an_absurd_ratio_stays_finite(name: str) -> None:
    logprobs, behavior = torch.tensor([0.0]), torch.tensor([-1e6])
    owners = torch.tensor([0])
    found = ActionTokens(logprobs, behavior, torch.ones(1), owners, 1, behavior, behavior)
    made = terms(found, name=name, kl=0.1, ratio_correction="unbounded")
    assert torch.isfinite(made.loss).all()
    assert torch.isfinite(made.importance_ratio).all()


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)])
def test_kl_estimators_by_hand(estimator: str, value: float) -> None:
    # policy twice as likely as the reference: log 2; (log 2)^2 / 2; 1/2 - 1 + log 2
    ref = torch.tensor([BEHAVIOR - math.log(2)])
    made = terms(tokens([1.0], [0.0], ref_logprobs=ref), kl=0.1, kl_estimator=estimator, kl_in="reward")
    assert made.kl.item() == pytest.approx(value, abs=1e-6)


def test_kl_in_the_loss_and_in_the_reward_by_hand() -> None:
    # two tokens, each with k1 = log 2: in the reward the first answers for both, the second for itself
    ref = torch.full((2,), BEHAVIOR - math.log(2))
    found = tokens([1.0, 1.0], [0.0, 0.0], ref_logprobs=ref)
    in_loss = terms(found, kl=0.1)
    assert in_loss.loss.tolist() == pytest.approx([0.0193147] * 2, abs=1e-6)
    in_reward = gradient(found, kl=0.1, kl_estimator="k1", kl_in="reward")
    assert in_reward.tolist() == pytest.approx([2 * 0.0693147, 0.0693147], abs=1e-6)


def test_a_row_answers_for_its_own_tokens_only() -> None:
    found = tokens([1.0] * 5, [0.0] * 5, [0, 0, 1, 1, 1])
    assert found.to_go(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist() == [3.0, 2.0, 12.0, 9.0, 5.0]


def test_the_kl_coefficient_seeks_its_target() -> None:
    # at twice the target: 1 + 0.1 * min(1, 0.2); at half: 1 + 0.1 * max(-0.5, -0.2); a tenth above: 1 + 0.1 * 0.1
    assert adapted(0.1, 0.02, 0.01) == pytest.approx(0.102)
    assert adapted(0.1, 0.005, 0.01) == pytest.approx(0.098)
    assert adapted(0.1, 0.011, 0.01) == pytest.approx(0.101)
    assert adapted(0.1, 5.0, None) == 0.1


def test_aggregations_by_hand() -> None:
    # rows of 1 and 3 tokens, each token's loss 1 (A = -1): token mean 1, sequence mean 1; sum over the longest (10)
    # with losses 1 on the short row alone: token 1/4, sequence 1/2, constant 1/20
    found = tokens([1.0] * 4, [-1.0, 0.0, 0.0, 0.0], [0, 1, 1, 1])
    sums = {name: terms(found, aggregation=name).loss.sum().item() / 4 for name in AGGREGATIONS}
    assert sums == pytest.approx({"token": 0.25, "sequence": 0.5, "constant": 0.05})


def test_rows_outside_the_band_teach_nothing() -> None:
    # geometric means 1 (2 * 0.5) and 2: the band takes the second out, whole
    found = tokens([2.0, 0.5, 2.0, 2.0], [1.0] * 4, [0, 0, 1, 1])
    made = terms(found, name="reinforce", sequence_band=[0.9, 1.1])
    assert made.loss[2:].tolist() == [0.0, 0.0]
    assert made.clipped.tolist() == [False, False, True, True]
    assert made.loss[:2].abs().min() > 0


def test_rows_outside_the_band_are_still_held_to_the_starting_policy() -> None:
    # a ratio of 2 to behavior and reference alike; k2 is (log 2)^2 / 2, times the coefficient 0.1
    found = tokens([1.0, 2.0], [1.0, 1.0], [0, 1], ref_logprobs=torch.full((2,), BEHAVIOR))
    made = terms(found, name="reinforce", sequence_band=[0.9, 1.1], kl=0.1, kl_estimator="k2")
    assert made.loss[1].item() == pytest.approx(0.1 * math.log(2) ** 2 / 2)


def test_a_failure_that_the_policy_has_left_is_not_pushed_further() -> None:
    # row 0: negative and log(1/0.5) = 0.69 away; row 1: positive and as far; row 2: negative and near
    found = tokens([0.5, 0.5, 1.0], [-1.0, 1.0, -1.0], [0, 1, 2])
    assert terms(found, name="reinforce", negative_shift=0.1).clipped.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"name": "grpo", "mixture": {"grpo": 0.5}}, "mixture"),
        ({"kl": 0.1, "kl_estimator": "k1"}, "k1"),
        ({"sequence_band": [1.1, 0.9]}, "sequence_band"),
        ({"kl": 0.0, "kl_target": 0.01}, "kl_target"),
    ],
)
def test_a_contradiction_is_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Objective.model_validate(options)


def test_every_name_in_the_settings_is_an_objective() -> None:
    assert {Objective(name=name).name for name in OBJECTIVES} == set(OBJECTIVES)  # pyright: ignore[reportArgumentType]
