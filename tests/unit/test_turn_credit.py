"""Credit by turn: expected values worked by hand."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.settings import Credit
from tests.experience import Sample, experience, table
from trainers.batches import Split, Tokens, rank_batches
from trainers.credit import BASELINES, Evidence, ProcessScale, Turns, process_weight
from trainers.credit.value import clipped_value_loss, explained_variance, gae, value_advantages, whitened
from trainers.value_head import states_of


def rows_of(*samples: Sample) -> tuple[pa.Table, Tokens]:
    rows = experience(samples)
    return rows, Tokens.of(rows)


def sample(name: str, reward: float, *process: float, mean: float = 0.5, std: float = 0.5, **more: object) -> Sample:
    """One action token and one observation token a turn, after one token of prompt."""
    count = len(process)
    return Sample(
        name,
        reward=reward,
        mean=mean,
        std=std,
        token_ids=[1] * (1 + 2 * count),
        action_mask=[False, *[True, False] * count],
        behavior_logprobs=[0.0] * (1 + 2 * count),
        turns=[(1 + 2 * k, 2 + 2 * k, r) for k, r in enumerate(process)],
        **more,  # pyright: ignore[reportArgumentType]
    )


def evidence_of(*samples: Sample, factor: float = 0.0) -> Evidence:
    rows, tokens = rows_of(*samples)
    return Evidence.of(rows, Turns.of(rows, tokens), factor)


def test_the_outcome_reaches_every_action_and_no_observation() -> None:
    # two turns of one token, back to back, then two observation tokens: 1, and 0.9 * 0.95 = 0.855
    one = Sample("a", reward=1.0, token_ids=[9, 1, 2, 3, 4], action_mask=[False, True, True, False, False],
                 behavior_logprobs=[0.0] * 5, turns=[(1, 2, 0.0), (2, 3, 0.0)])  # fmt: skip
    rows, tokens = rows_of(one)
    turns = Turns.of(rows, tokens)
    evidence = Evidence.of(rows, turns, 0.0)
    for gamma, expected in ((0.9, [0, 0.855, 1, 0, 0]), (0.0, [0, 0, 1, 0, 0])):
        advantages, _ = value_advantages(evidence, np.zeros(3), Credit(gamma=gamma, lam=0.95))
        assert turns.spread(advantages, tokens).tolist() == pytest.approx(expected)


def test_an_episode_that_was_cut_off_has_not_ended_with_nothing() -> None:
    # reward 0, value 0.5 here and next, gamma 1: delta 0 + 0.5 - 0.5 = 0; had it terminated, -0.5
    for status, expected in (("truncated", 0.0), ("completed", -0.5)):
        evidence = evidence_of(sample("a", 0.0, 0.0, status=status))
        advantages, targets = value_advantages(evidence, np.array([0.5, 0.5]), Credit(gamma=1.0))
        assert advantages.tolist() == pytest.approx([expected])
        assert targets.tolist() == pytest.approx([0.5 + expected])


def test_gae_by_hand() -> None:
    # gamma 0.5, lam 0.5; rewards 1, 2; values 0.4, 0.8, end 0: delta_1 = 2 - 0.8 = 1.2, delta_0 = 1 + 0.4 - 0.4 = 1
    assert gae([1, 2], [0.4, 0.8, 0], 0.5, 0.5).tolist() == pytest.approx([1 + 0.25 * 1.2, 1.2])


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=6), st.floats(0, 1))
def test_at_lambda_one_gae_is_the_return_less_the_value(rewards: list[float], gamma: float) -> None:
    values = [*np.linspace(-1, 1, len(rewards)).tolist(), 0.0]
    returns = [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]
    assert gae(rewards, values, gamma, 1.0).tolist() == pytest.approx(np.subtract(returns, values[:-1]), abs=1e-9)


def test_turns_come_from_the_mask_where_the_lake_says_nothing_about_them() -> None:
    tokens = table([([1] * 6, [False, True, True, False, True, False], [0.0] * 6), ([1] * 2, [False] * 2, [0.0] * 2),
                    ([1] * 3, [True, True, True], [0.0] * 3)])  # fmt: skip
    turns = Turns.of(pa.table({}), tokens)
    assert turns.starts.tolist() == [1, 4, 9]  # the first token of a row has no logprob
    assert (turns.owners.tolist(), turns.bounds.tolist()) == ([0, 0, 2], [0, 2, 2, 3])
    assert turns.spread(np.array([1.0, 2.0, 3.0]), tokens).tolist() == [0, 1, 1, 0, 2, 0, 0, 0, 0, 3, 3]
    assert turns.to_go(np.array([1.0, 2.0, 4.0]), 0.5).tolist() == [2.0, 2.0, 4.0]


def test_a_turns_reward_is_its_own_in_whatever_order_rows_are_drawn() -> None:
    rows, _ = rows_of(sample("a", 1.0, 0.25, 0.5), sample("b", 0.0, 1.0))
    turned = rows.take([1, 0])
    assert Turns.of(turned, Tokens.of(turned)).rewards.tolist() == [1.0, 0.25, 0.5]


def test_a_reward_of_a_row_without_a_prompt_goes_to_no_other_row() -> None:
    # the first token of a row has no logprob: in b the turn begins with the second, in c none is left of it
    bare = {"token_ids": [1, 2, 3], "behavior_logprobs": [0.0] * 3}
    b = Sample("b", action_mask=[True, True, False], turns=[(0, 2, 0.5)], **bare)
    c = Sample("c", action_mask=[True, False, False], turns=[(0, 1, 0.75)], **bare)
    rows, tokens = rows_of(sample("a", 1.0, 0.25), b, c)
    turns = Turns.of(rows, tokens)
    assert (turns.owners.tolist(), turns.rewards.tolist()) == ([0, 1], [0.25, 0.5])


def test_without_process_rewards_a_group_credits_all_turns_of_a_row_alike() -> None:
    # (1 - 0.5) / (0.5 + 1e-4); without the deviation (Dr. GRPO) 0.5
    evidence = evidence_of(sample("a", 1.0, 1.0, 0.0), sample("b", 0.0, 0.0))
    scaled = BASELINES["group"](evidence, Credit())
    assert scaled.tolist() == pytest.approx([0.5 / 0.5001, 0.5 / 0.5001, -0.5 / 0.5001])
    assert BASELINES["group"](evidence, Credit(std=False)).tolist() == [0.5, 0.5, -0.5]
    # 8 rewards in the whole group: (r - m) * 8 / 7
    assert BASELINES["leave_one_out"](evidence, Credit()).tolist() == pytest.approx([4 / 7, 4 / 7, -4 / 7])


def test_a_process_reward_counts_for_its_turn_and_those_before_it() -> None:
    # factor 0.1: 0.1, 0 and 0 have mean 1/30; to go in row a: 0.1 - 1/30 = 2/30, plus gamma 0.5 of -1/30
    evidence = evidence_of(sample("a", 1.0, 1.0, 0.0), sample("b", 0.0, 0.0), factor=0.1)
    credited = BASELINES["group"](evidence, Credit(std=False, gamma=0.5))
    assert credited.tolist() == pytest.approx([0.5 + 2 / 30 - 0.5 / 30, 0.5 - 1 / 30, -0.5 - 1 / 30])


def test_siblings_are_compared_at_the_same_turn() -> None:
    # gamma 0.5. Returns: a 0.5, 1; b 0, 0 -> means 0.25 and 0.5. c has a third turn alone: the group's mean, 0.5
    options = Credit(baseline="turn_group", gamma=0.5, std=False)
    evidence = evidence_of(sample("a", 1.0, 0, 0), sample("b", 0.0, 0, 0))
    assert BASELINES["turn_group"](evidence, options).tolist() == pytest.approx([0.25, 0.5, -0.25, -0.5])
    alone = evidence_of(sample("a", 1.0, 0), sample("b", 0.0, 0), sample("c", 1.0, 0, 0))
    # turn 0: 1, 0, 0.5 -> mean 0.5; turn 1: c alone, 1 - 0.5
    assert BASELINES["turn_group"](alone, options).tolist() == pytest.approx([0.5, -0.5, 0.0, 0.5])


def test_a_row_whose_siblings_are_missing_is_compared_with_the_whole_closed_group() -> None:
    # the group's mean 0.25 counts the missing; turn 0 of 2 is discounted like the row's outcome: 0.5 (1 - 0.25)
    evidence = evidence_of(sample("a", 1.0, 0, 0, mean=0.25))
    options = Credit(baseline="turn_group", gamma=0.5, std=False)
    assert BASELINES["turn_group"](evidence, options).tolist() == pytest.approx([0.375, 0.75])


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 3)), min_size=2, max_size=6))
def test_advantages_of_siblings_at_the_same_turn_sum_to_zero(members: list[tuple[float, int]]) -> None:
    evidence = evidence_of(*(sample(f"m{i}", r, *[0.0] * k) for i, (r, k) in enumerate(members)))
    found = BASELINES["turn_group"](evidence, Credit(baseline="turn_group", std=False))
    numbers = evidence.turns.numbers
    for number in set(numbers.tolist()):
        if (numbers == number).sum() > 1:
            assert found[numbers == number].sum() == pytest.approx(0.0, abs=1e-9)


def test_constant_groups_and_missing_rewards_earn_exactly_nothing() -> None:
    mean = float(np.float32(0.95))
    constant = evidence_of(*(sample(name, 0.95, 0, mean=mean, std=0.0) for name in "ab"))
    missing = evidence_of(Sample("a", reward=None, mean=None, std=None))
    for name, baseline in BASELINES.items():
        assert np.abs(baseline(constant, Credit())).max() == pytest.approx(0.0, abs=1e-12), name
        assert baseline(missing, Credit()).tolist() == [0.0], name


def test_process_rewards_lose_their_weight_in_a_straight_line() -> None:
    options = Credit(process_weight=0.1, process_anneal_steps=4)
    weights = [process_weight(step, options) for step in (1, 2, 3, 5, 9)]
    assert weights == pytest.approx([0.1, 0.075, 0.05, 0.0, 0.0])


def test_process_rewards_are_scaled_to_deviate_as_outcomes_do() -> None:
    # outcomes 0, 1: variance 1/4; process rewards 0, 10: 25 -> factor 1/10
    scale = ProcessScale().after(np.array([0.0, 1.0, np.nan]), np.array([0.0, 10.0]))
    assert scale.factor == pytest.approx(0.1)
    # a second batch without any deviation: weights 0.9 and 1 of 1.9 -> both variances shrink alike
    assert scale.after(np.array([1.0, 1.0]), np.array([10.0, 10.0])).factor == pytest.approx(0.1)
    assert ProcessScale().after(np.array([0.0, 1.0]), np.array([1.0, 1.0])).factor == 0.0
    assert ProcessScale().after(np.array([0.0, 1.0]), np.array([1.0, 1.0001])).factor == 10.0


def test_value_loss_is_clipped_around_what_was_believed_before() -> None:
    # before 0, target 1, clip 0.2: at 0.5 max(0.25, 0.64) / 2 = 0.32 with no gradient; at 0.1 (0.81) / 2
    values = torch.tensor([0.5, 0.1], requires_grad=True)
    loss = clipped_value_loss(values, torch.zeros(2), torch.ones(2), 0.2)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.32, 0.405])
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -0.9])


def test_explained_variance_is_one_for_a_perfect_head_and_zero_for_a_constant_one() -> None:
    targets = np.array([0.0, 1.0, 2.0])
    found = [explained_variance(v, targets) for v in (targets, np.full(3, 7.0), -targets)]
    assert found == pytest.approx([1.0, 0.0, -3.0])  # Var(2 t) / Var(t) = 4
    assert explained_variance(np.zeros(2), np.ones(2)) == 0.0


def test_whitening_leaves_advantages_alone_that_are_all_alike() -> None:
    # mean 1, std 1, of the first two only: the third is not learned from
    assert whitened(np.array([0.0, 2.0, 5.0]), np.array([0, 1])).tolist() == pytest.approx([-1, 1, 4], abs=1e-3)
    assert whitened(np.array([0.3, 0.3]), np.array([0, 1])).tolist() == [0.3, 0.3]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_state_is_the_token_before_a_turn_or_the_last_of_its_row(parts: int) -> None:
    rows, tokens = rows_of(sample("a", 1.0, 0, 0), sample("b", 0.0, 0), sample("c", 0.0, 0, 0, 0))
    turns = Turns.of(rows, tokens)
    zeros, ids = np.zeros(len(tokens.token_ids), np.float32), turns.of_tokens(len(tokens.token_ids))
    found: dict[int, tuple[int, int]] = {}
    for batch in rank_batches(tokens, zeros, Split(parts), 0, 1, ids):
        where, states = states_of(batch, torch.from_numpy(turns.bounds))
        places = [(int(batch.rows[row]), int(token)) for row, token in where.nonzero().tolist()]
        found |= dict(zip(states.tolist(), places, strict=True))
    # row by row: before each action (0, 2, ...), then the last token
    assert [found[i] for i in range(9)] == [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2), (2, 0), (2, 2), (2, 4), (2, 6)]
