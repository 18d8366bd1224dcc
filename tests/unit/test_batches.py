"""Rows to tensors: alignment, padding, and that every split of a batch gives the same gradient."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SettingsError
from schemas.settings import Policy
from tests.experience import spread, table, terms_of
from trainers.batches import Split, Tokens, micro_batches, num_action_tokens, rank_batches
from trainers.policy import Scorer, check_packing, tiny_llama

VOCABULARY = 16


def random_table(num_rows: int, seed: int = 0) -> Tokens:
    random = np.random.default_rng(seed)
    rows = []
    for length in random.integers(3, 12, num_rows).tolist():
        mask = [False, *(random.random(length - 1) < 0.6).tolist()]
        behavior = np.where(mask, -random.random(length) * 3, 0.0)
        rows.append((random.integers(0, VOCABULARY, length).tolist(), mask, behavior.tolist()))
    return table(rows)


def scorer(temperature: float = 1.0) -> Scorer:
    policy = Policy(hidden=32, layers=1, intermediate=32, max_positions=64)
    return Scorer(tiny_llama(policy, VOCABULARY, 2, 0, seed=3), temperature)


def test_tensors_are_shifted_to_predict_the_next_token() -> None:
    rows = table(
        [([5, 6, 7, 8], [False, False, True, True], [0.0, 0.0, -0.5, -0.25]), ([9, 3], [False, True], [0, -2])]
    )
    (batch,) = micro_batches(rows, spread(np.array([1.0, -1.0]), rows), 1)
    assert batch.rows.tolist() == [1, 0]  # shortest first
    assert batch.token_ids.tolist() == [[9, 3, 0, 0], [5, 6, 7, 8]]
    assert batch.action_mask.tolist() == [[True, False, False], [False, True, True]]
    assert batch.behavior_logprobs.tolist() == [-2.0, -0.5, -0.25]
    assert batch.advantages.tolist() == [-1.0, 1.0, 1.0]
    assert batch.owners.tolist() == [0, 1, 1]


def test_there_are_always_as_many_micro_batches_as_asked_for() -> None:
    rows = random_table(2)
    batches = list(micro_batches(rows, spread(np.ones(2), rows), 4))
    assert [len(b.rows) for b in batches] == [1, 1, 0, 0]
    assert batches[3].behavior_logprobs.shape == (0,)


def test_equal_weights_give_ratio_one_at_every_action_token() -> None:
    # 20 tokens scored one by one, unpadded, as a sampler sees them; then in a padded batch, as the learner does
    model = scorer()
    ids = torch.randint(0, VOCABULARY, (20,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        steps = [
            model.model(input_ids=ids[None, :i]).logits[0, -1].log_softmax(-1)[ids[i]].item() for i in range(1, 20)
        ]
        rows = table(
            [
                (ids.tolist(), [False] * 4 + [True] * 16, [0.0] * 4 + steps[3:]),
                ([1] * 30, [False, *[True] * 29], [0.0] * 30),
            ]
        )
        (batch,) = micro_batches(rows, spread(np.ones(2), rows), 1)
        logprobs = model(batch.token_ids, batch.action_mask)
    mine = batch.owners == 0
    ratios = (logprobs - batch.behavior_logprobs)[mine].exp()
    assert ratios.tolist() == pytest.approx([1.0] * 16, abs=1e-4)


def test_logprobs_are_of_the_distribution_that_was_sampled_from() -> None:
    # logits (2, 1, 0) at temperature 0.5: log softmax (4, 2, 0)[0] = -log(1 + e^-2 + e^-4) = -0.143
    class Fixed(torch.nn.Module):
        config = type("Config", (), {"model_type": "fixed"})

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
            return type("Output", (), {"logits": torch.tensor([2.0, 1.0, 0.0]).expand(*input_ids.shape, 3)})

    ids = torch.tensor([[1, 0]])
    logprob = Scorer(Fixed(), 0.5)(ids, torch.tensor([[True]]))  # pyright: ignore[reportArgumentType]
    assert logprob.item() == pytest.approx(-0.143, abs=1e-3)
    assert logprob.item() == pytest.approx(-math.log(1 + math.exp(-2) + math.exp(-4)), abs=1e-6)


def test_loss_of_uneven_micro_batches_is_one_mean_over_all_tokens() -> None:
    # one action token with loss 1, nine with loss 0: 0.1, not the mean of means (0.5)
    rows = table([([1, 2], [False, True], [0.0, 0.0]), ([1] * 10, [False] + [True] * 9, [0.0] * 10)])
    advantages, total = spread(np.array([-1.0, 0.0]), rows), int(num_action_tokens(rows).sum())
    assert total == 10
    for parts in (1, 2):
        loss = 0.0
        for batch in micro_batches(rows, advantages, parts):
            zeros = torch.zeros(len(batch.behavior_logprobs))
            loss += terms_of(batch, zeros).loss.sum().item() / total
        assert loss == pytest.approx(0.1)


def gradients(batches: list, total: int) -> torch.Tensor:
    model = scorer()
    for batch in batches:
        logprobs = model(batch.token_ids, batch.action_mask, position_ids=batch.position_ids)
        (terms_of(batch, logprobs).loss.sum() / total).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("split", "ranks"),
    [(Split(4), 1), (Split(6), 2), (Split(2, packing=True), 1), (Split(1, 30), 2), (Split(1, 30, True), 2)],
    ids=str,
)
def test_every_split_over_micro_batches_and_ranks_gives_the_same_gradient(split: Split, ranks: int) -> None:
    rows = random_table(12)
    advantages = spread(np.random.default_rng(1).normal(size=12), rows)
    total = int(num_action_tokens(rows).sum())
    whole = gradients(list(micro_batches(rows, advantages, 1)), total)
    made = [list(rank_batches(rows, advantages, split, rank, ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in made}) == 1
    flat = [b for batches in made for b in batches]
    assert sorted(int(i) for b in flat for i in b.rows) == list(range(12))
    assert any(b.position_ids is not None for b in flat) == split.packing
    assert (gradients(flat, total) - whole).norm() <= 1e-6 * whole.norm()


def test_packed_rows_lie_end_to_end_in_lines_of_the_longest() -> None:
    # lengths 2, 3, 4, 6: the first fit, longest first, gives 6, 4 + 2, 3
    rows = table([([n] * n, [False] + [True] * (n - 1), [0.0] + [-float(n)] * (n - 1)) for n in (2, 3, 4, 6)])
    (batch,) = rank_batches(rows, spread(np.arange(4.0), rows), Split(packing=True), 0, 1)
    assert batch.position_ids is not None
    assert batch.token_ids.tolist() == [[3, 3, 3, 0, 0, 0], [4, 4, 4, 4, 2, 2], [6] * 6]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 0], [0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert batch.action_mask.int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 1], [1] * 5]
    assert batch.rows.tolist() == [1, 2, 0, 3]
    assert batch.ends.tolist() == [2, 9, 11, 17]
    assert batch.behavior_logprobs.tolist() == [-3.0] * 2 + [-4.0] * 3 + [-2.0] + [-6.0] * 5
    assert batch.owners.tolist() == [0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 3]


def test_a_micro_batch_has_no_more_tokens_than_asked_for_unless_a_row_alone_has() -> None:
    # rows of 2, 3, 4 and 9 tokens in at most 8, padding included: 2 lines of 3, then 1 of 4, for 2 of 9 are too many
    rows = table([([1] * n, [True] * n, [0.0] * n) for n in (9, 3, 4, 2)])
    parts = list(rank_batches(rows, spread(np.ones(4), rows), Split(4, 8), 0, 1))
    assert [tuple(b.token_ids.shape) for b in parts] == [(2, 3), (1, 4), (1, 9)]
    # of two ranks one needs two micro-batches for its rows of 3 and 9 tokens, the other one for 2 and 4: both get two
    both = [list(rank_batches(rows, spread(np.ones(4), rows), Split(4, 8), rank, 2)) for rank in (0, 1)]
    assert [[len(b.rows) for b in batches] for batches in both] == [[2, 0], [1, 1]]


def test_a_policy_whose_packed_rows_see_one_another_is_refused() -> None:
    class Leaky(torch.nn.Module):
        config = type("Config", (), {"model_type": "leaky"})

        def forward(self, input_ids: torch.Tensor, use_cache: bool, position_ids: torch.Tensor) -> object:
            seen = input_ids.cumsum(1).float()
            return type("Output", (), {"logits": torch.stack([seen, -seen, seen * 0], -1).repeat(1, 1, 6)})

    check_packing(scorer())
    with pytest.raises(SettingsError, match=r"learner\.packing.*leaky"):
        check_packing(Scorer(Leaky()))  # pyright: ignore[reportArgumentType]


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 1000))
def test_no_row_and_no_action_token_is_lost(parts: int, num_rows: int, seed: int) -> None:
    rows = random_table(num_rows, seed)
    batches = list(micro_batches(rows, spread(np.ones(num_rows), rows), parts))
    assert sorted(int(i) for b in batches for i in b.rows) == list(range(num_rows))
    assert sum(len(b.behavior_logprobs) for b in batches) == rows.action_mask.sum()
    assert num_action_tokens(rows).sum() == rows.action_mask.sum()


def test_sliced_and_chunked_columns_are_read_right() -> None:
    rows = [([i] * (2 + i), [False] + [True] * (1 + i), [0.0] + [-float(i)] * (1 + i)) for i in range(9)]
    names = ("token_ids", "action_mask", "behavior_logprobs")
    types = (pa.list_(pa.int32()), pa.list_(pa.bool_()), pa.list_(pa.float32()))
    columns = zip(*rows, strict=True)
    whole = pa.table({n: pa.array(c, t) for n, c, t in zip(names, columns, types, strict=True)})
    tokens = Tokens.of(pa.concat_tables([whole.slice(0, 4), whole.slice(4, 3)]).slice(2, 5))
    assert tokens.lengths.tolist() == [4, 5, 6, 7, 8]
    assert num_action_tokens(tokens).tolist() == [3, 4, 5, 6, 7]
    taken = tokens.take([4, 0])
    (batch,) = micro_batches(taken, spread(np.ones(2), taken), 1)
    assert batch.token_ids.tolist() == [[2, 2, 2, 2, 0, 0, 0, 0], [6] * 8]
    assert batch.behavior_logprobs.tolist() == [-2.0] * 3 + [-6.0] * 7
