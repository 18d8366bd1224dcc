"""Adapters: no change at first, they alone learn, and merged they are an ordinary model."""

import pytest
import torch
from torch import Tensor, nn

from schemas.errors import SettingsError
from schemas.settings import Learner, Policy
from trainers.lora import Adapted, adapt, check_alike, description, merged, put_in, switched_off
from trainers.policy import Scorer, in_float32, tiny_llama

LEARNER = Learner(lora_rank=2, lora_alpha=8)


def policy() -> Scorer:
    return Scorer(tiny_llama(Policy(hidden=32, layers=1, intermediate=32, max_positions=64), 16, 2, 0, seed=3))


def logprobs(scorer: Scorer) -> Tensor:
    ids = torch.arange(12)[None]
    return scorer(ids, torch.ones_like(ids[:, 1:], dtype=torch.bool))


def trained() -> Scorer:
    scorer = policy()
    adapt(scorer.model, LEARNER)
    optimizer = torch.optim.AdamW([x for x in scorer.parameters() if x.requires_grad], lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        (-logprobs(scorer).sum()).backward()
        optimizer.step()
    return scorer


def test_an_update_is_scaled_by_alpha_over_rank() -> None:
    # W = (1, 2), A = (1, 1), B = 0.5, alpha / rank = 2: W + 2 * 0.5 * (1, 1) = (2, 3), and of (1, 1) it makes 5
    layer = Adapted(nn.Linear(2, 1, bias=False), 1, 2.0)
    for parameter, values in ((layer.base.weight, [[1.0, 2.0]]), (layer.lora_A, [[1.0, 1.0]]), (layer.lora_B, [[0.5]])):
        parameter.data = torch.tensor(values)
    assert layer(torch.ones(2)).tolist() == [5.0]
    whole = merged({f"q.{name}": x for name, x in layer.state_dict().items()}, layer.scale)
    assert {name: x.tolist() for name, x in whole.items()} == {"q.weight": [[2.0, 3.0]]}


def test_new_adapters_change_nothing() -> None:
    scorer = policy()
    before = logprobs(scorer)
    adapt(scorer.model, LEARNER)
    assert torch.equal(logprobs(scorer), before)


def test_only_adapters_learn_and_without_them_it_is_the_policy_of_before() -> None:
    scorer, start = trained(), policy()
    assert (logprobs(scorer) - logprobs(start)).sum() > 0.1
    with switched_off(scorer):
        assert torch.equal(logprobs(scorer), logprobs(start))
    assert {n.rpartition(".")[2] for n, x in scorer.named_parameters() if x.grad is not None} == {"lora_A", "lora_B"}


def test_merged_weights_are_those_of_an_ordinary_model_with_the_same_logprobs() -> None:
    scorer, plain = trained(), policy()
    plain.model.load_state_dict(merged(scorer.model.state_dict(), 4.0))
    assert torch.allclose(logprobs(plain), logprobs(scorer), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_probe_with_merged_weights_is_that_of_who_reads_them(dtype: torch.dtype) -> None:
    scorer, plain = trained(), policy()
    scorer.to(dtype)
    whole = merged(scorer.model.state_dict(), 4.0)
    plain.to(dtype)
    plain.model.load_state_dict(whole)
    apart = logprobs(scorer)
    with in_float32(scorer), put_in(scorer.model, whole):
        inside = logprobs(scorer)
    with in_float32(plain):
        assert torch.equal(inside, logprobs(plain))
    assert torch.equal(logprobs(scorer), apart)
    if dtype == torch.bfloat16:  # rounding the sum is more than the rounding of its parts
        with in_float32(scorer):
            assert (logprobs(scorer) - inside).abs().max() > 1e-4


def test_an_output_head_that_is_the_embeddings_gets_no_adapter() -> None:
    model = policy().model
    model.set_output_embeddings(nn.Linear(32, 16, bias=False))
    adapt(model, learner := Learner(lora_rank=2, lora_targets=("lm_head",)))
    model.set_output_embeddings(head := nn.Linear(32, 16, bias=False))
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    head.weight = embeddings.weight
    with pytest.raises(SettingsError, match=r"\['lm_head'\], whose weight is that of the embeddings"):
        adapt(model, learner)


def test_a_target_that_is_no_linear_layer_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"\['embed_tokens'\].*q_proj"):
        adapt(policy().model, Learner(lora_rank=2, lora_targets=("q_proj", "embed_tokens")))


@pytest.mark.parametrize("other", [Learner(), Learner(lora_rank=4, lora_alpha=8), Learner(lora_rank=2, lora_alpha=16)])
def test_a_checkpoint_of_other_adapters_is_refused(other: Learner) -> None:
    check_alike(description(LEARNER), LEARNER, "step-1")
    with pytest.raises(SettingsError, match="step-1 has adapters 'rank 2, alpha 8"):
        check_alike(description(LEARNER), other, "step-1")
