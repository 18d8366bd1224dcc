"""The embedded engine: the same numbers as `transformers`, sampled fairly, swapped in flight."""

import asyncio
import json
import math
import random
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from inference.engines.base import EngineError, Generation
from inference.engines.llama import Llama
from inference.engines.sampler import Request, Sampler, choose
from inference.engines.torch_engine import TorchEngine
from infra.weights import WeightStore, describe, fingerprint_file
from schemas.messages import Manifest
from schemas.trajectory import WeightVersionSpan
from tests.policies import VOCABULARY, write_policy

AT = datetime(2026, 1, 1, tzinfo=UTC)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("v1"), seed=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("v2"), seed=2)


def _prompt(seed: int, length: int = 18) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def _engine(folder: Path, sessions: int = 8) -> TorchEngine:
    return TorchEngine(folder, 1, max_sessions=sessions, max_tokens=200)


async def _say(engine: TorchEngine, ids: list[int], number: int = 10, *, session: str = "s", **other) -> Generation:
    options = {"temperature": 1.0, "stop_ids": (), "seed": 3, **other}
    return await engine.generate(session, ids, max_new_tokens=number, **options)


def _request(session: str, ids: list[int], number: int) -> Request:
    return Request(session, list(ids), number, 1.0, frozenset(), random.Random(session))


def _finish(sampler: Sampler, request: Request) -> Generation:
    assert sampler.admit(request)
    while True:
        for done, generation in sampler.advance():
            if done is request:
                return generation


def _worst(generation: Generation, llama: Llama, prompt: list[int]) -> float:
    """Largest difference between the logprobs of `generation` and those of a fresh pass over the whole."""
    expected = llama.logprobs([*prompt, *generation.token_ids])[len(prompt) - 1 :]
    return max(abs(a - b) for a, b in zip(generation.logprobs, expected, strict=True))


@pytest.mark.parametrize(
    "shape",
    [
        {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 32},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "rope_parameters": LLAMA3},
        {"num_attention_heads": 2, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ],
    ids=["plain", "grouped, tied, wide heads", "llama3 rope", "linear rope"],
)
def test_logprobs_are_those_of_transformers(shape, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (slow to import)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        **shape,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompt = _prompt(0)
    sampler = Sampler(Llama(tmp_path), 1, 4, 200)
    generation = _finish(sampler, _request("s", prompt, 20))
    whole = torch.tensor([[*prompt, *generation.token_ids]])
    with torch.no_grad():
        expected = model(whole).logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])[len(prompt) - 1 :, 0]
    ratios = (expected - torch.tensor(generation.logprobs)).exp()
    assert torch.allclose(ratios, torch.ones(20), atol=1e-4)
    assert torch.allclose(torch.tensor(sampler.logprobs(whole[0].tolist()))[len(prompt) - 1 :], expected, atol=1e-4)


def test_temperature_divides_the_logits():
    # logits (2, 1, 0) / 0.5 = (4, 2, 0): log(e^4 / (e^4 + e^2 + 1)) = -0.1429
    picks, logprobs = choose(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.5]), torch.tensor([0.1]))
    assert picks == [0]
    assert logprobs[0] == pytest.approx(-0.143, abs=5e-4)


def test_temperature_zero_takes_the_likeliest_token_and_leaves_no_choice():
    logits, zero = torch.tensor([[0.0, 3.0, 1.0]]), torch.zeros(1)
    assert choose(logits, zero, torch.tensor([0.99])) == ([1], [0.0])


def test_a_uniform_number_picks_the_token_whose_part_of_the_line_it_falls_on():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(5, 3)
    picks, _ = choose(logits, torch.ones(5), torch.tensor([0.0, 0.49, 0.51, 0.79, 0.81]))
    assert picks == [0, 0, 1, 1, 2]


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=50), st.integers(0, 2**24 - 1))
def test_no_token_of_probability_zero_is_ever_picked(logits, number):
    row = torch.tensor([[-math.inf, *logits, -math.inf]])
    (pick,), (logprob,) = choose(row, torch.ones(1), torch.tensor([number * 2.0**-24]))
    assert 1 <= pick <= len(logits)
    assert math.isfinite(logprob)


def test_broken_weights_are_an_error_not_a_sample():
    with pytest.raises(EngineError, match="not finite"):
        choose(torch.tensor([[math.nan, 1.0]]), torch.ones(1), torch.zeros(1))


def test_rows_that_join_and_leave_do_not_change_one_another(policy):
    llama = Llama(policy)
    sampler = Sampler(llama, 1, 5, 200)
    lengths = {f"{i}": (3 + 29 * i, 4 + 5 * (i % 3)) for i in range(6)}
    waiting = [(name, _prompt(i, lengths[name][0])) for i, name in enumerate(lengths)]
    prompts, answers = dict(waiting), {}
    while len(answers) < len(lengths):
        if waiting and sampler.admit(_request(*waiting[0], lengths[waiting[0][0]][1])):
            waiting.pop(0)  # one joins between any two passes, the sixth when a row is free
        answers |= {request.session: generation for request, generation in sampler.advance()}
    for name, generation in answers.items():
        assert len(generation.token_ids) == lengths[name][1]
        assert _worst(generation, llama, prompts[name]) < 1e-4
        alone = _finish(Sampler(llama, 1, 1, 200), _request(name, prompts[name], lengths[name][1]))
        assert alone.token_ids == generation.token_ids


def test_a_session_reads_only_what_is_new_to_it(policy):
    llama = Llama(policy)
    sampler = Sampler(llama, 1, 2, 200)
    first = _finish(sampler, _request("s", prompt := _prompt(0), 6))
    assert sampler.num_tokens == 18 + 5  # the last sampled token has not been read yet
    longer = [*prompt, *first.token_ids, *_prompt(1, 7)]
    second = _finish(sampler, _request("s", longer, 4))
    assert sampler.num_tokens == 18 + 6 + 7 + 3
    assert _worst(second, llama, longer) < 1e-4


def test_an_idle_session_gives_way_and_is_read_again_when_it_returns(policy):
    llama = Llama(policy)
    sampler = Sampler(llama, 1, 1, 200)
    first = _finish(sampler, _request("a", prompt := _prompt(0), 6))
    _finish(sampler, _request("b", _prompt(1), 3))
    longer = [*prompt, *first.token_ids, *_prompt(2, 5)]
    assert _worst(_finish(sampler, _request("a", longer, 4)), llama, longer) < 1e-4


def test_a_prompt_longer_than_a_chunk_is_read_whole(policy):
    llama, prompt = Llama(policy), _prompt(0, 190)
    assert _worst(_finish(Sampler(llama, 1, 2, 200), _request("s", prompt, 10)), llama, prompt) < 1e-4


def test_tokens_are_stamped_with_the_version_that_sampled_them(policy, other):
    sampler = Sampler(Llama(policy), 7, 2, 200)
    request = _request("s", _prompt(0), 128)
    sampler.admit(request)
    for _ in range(57):
        sampler.advance()
    sampler.swap(Llama(other), 8)
    generation = next(g for _ in range(71) for _, g in sampler.advance())
    assert generation.spans == (WeightVersionSpan(0, 57, 7), WeightVersionSpan(57, 128, 8))


def test_after_a_swap_no_new_request_sees_what_the_old_weights_cached(policy, other):
    sampler, prompt = Sampler(Llama(policy), 1, 2, 200), _prompt(0)
    first = _finish(sampler, _request("s", prompt, 6))
    new = Llama(other)
    sampler.swap(new, 2)
    assert _worst(_finish(sampler, _request("fresh", prompt, 10)), new, prompt) < 1e-4
    longer = [*prompt, *first.token_ids]
    second = _finish(sampler, _request("s", longer, 10))
    assert second.spans == (WeightVersionSpan(0, 10, 2),)
    assert _worst(second, new, longer) < 1e-4


def test_tied_weights_are_swapped_with_their_head(tmp_path):
    old, new = write_policy(tmp_path / "a", seed=1, tied=True), write_policy(tmp_path / "b", seed=2, tied=True)
    sampler, prompt = Sampler(Llama(old), 1, 1, 200), _prompt(0)
    sampler.swap(Llama(new), 2)
    assert sampler.logprobs(prompt) == Llama(new).logprobs(prompt)


def test_a_delta_of_a_few_embedding_rows_moves_the_tied_head_with_them(tmp_path):
    # PrimeIntellect-ai/prime-rl#2823
    old = write_policy(tmp_path / "old", tied=True)
    new = Path(shutil.copytree(old, tmp_path / "new"))
    weights = load_file(new / "model.safetensors")
    weights["model.embed_tokens.weight"][[3, 7, 200]] += 0.5
    save_file(weights, new / "model.safetensors", {"format": "pt"})
    folders = {}
    for kind, before in (("full", None), ("delta", old)):
        store = WeightStore(str(tmp_path / kind))
        for version, folder, base in ((1, old, None), (2, new, before)):
            print_, files = fingerprint_file(folder / "model.safetensors"), describe(folder)
            made = Manifest(version=version, parent=version - 1 or None, files=files, fingerprint=print_, created_at=AT)
            assert store.publish(folder, made, base)
        assert store.manifest(2).kind == kind
        folders[kind] = store.fetch(2, tmp_path / f"{kind}-cache")
    full, delta = Llama(folders["full"]), Llama(folders["delta"])
    assert torch.equal(delta.head, delta.embedding)
    hidden = torch.randn(5, full.shape.hidden)
    assert torch.equal(full.logits(hidden), delta.logits(hidden))
    from transformers import LlamaForCausalLM  # noqa: PLC0415  (slow to import)

    model = LlamaForCausalLM.from_pretrained(folders["delta"])
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])
    sampler = Sampler(Llama(old), 1, 1, 200)
    sampler.swap(delta, 2)
    assert sampler.logprobs(_prompt(0)) == full.logprobs(_prompt(0))


def test_swaps_lose_no_request_and_end(policy, other):
    async def run() -> list[Generation]:
        engine = _engine(policy)
        requests = [asyncio.ensure_future(_say(engine, _prompt(i), 40, session=f"{i}")) for i in range(64)]
        await asyncio.sleep(0)
        for version in (2, 3):
            await asyncio.wait_for(engine.load(version, other), 30)
            assert engine.weight_version == version
        answers = await asyncio.wait_for(asyncio.gather(*requests), 60)
        await engine.close()
        return answers

    for generation in asyncio.run(run()):
        assert len(generation.token_ids) == len(generation.logprobs) == 40
        assert [s.start for s in generation.spans] == [0, *(s.end for s in generation.spans[:-1])]
        assert generation.spans[-1].end == 40


def test_requests_sent_during_a_swap_are_answered_whether_it_succeeds_or_not(policy, other, tmp_path):
    """64 requests begin while a swap is under way (https://github.com/verl-project/verl/pull/7511).

    The swap ends within its limit, and nobody waits for an answer that does not come.
    """

    async def run(folder: Path) -> tuple[int, list[Generation]]:
        engine = _engine(policy)
        first = asyncio.ensure_future(_say(engine, _prompt(99), 100, session="first"))
        await asyncio.sleep(0)
        swap = asyncio.ensure_future(engine.load(2, folder))
        await asyncio.sleep(0)
        assert not swap.done()
        requests = [asyncio.ensure_future(_say(engine, _prompt(i), 5, session=f"{i}")) for i in range(64)]
        await asyncio.wait_for(asyncio.gather(swap, return_exceptions=True), 30)
        answers = await asyncio.wait_for(asyncio.gather(first, *requests), 60)
        await engine.close()
        return engine.weight_version, answers

    version, answers = asyncio.run(run(other))
    assert version == 2
    assert [len(a.token_ids) for a in answers] == [100] + [5] * 64
    version, answers = asyncio.run(run(tmp_path / "missing"))
    assert version == 1
    assert {s.version for a in answers for s in a.spans} == {1}
    assert [len(a.token_ids) for a in answers] == [100] + [5] * 64


def test_weights_of_another_shape_are_refused_and_the_old_ones_stay(policy, tmp_path):
    async def run() -> None:
        engine = _engine(policy)
        with pytest.raises(EngineError, match="version 2 has shape"):
            await engine.load(2, write_policy(tmp_path / "wide", hidden=96))
        with pytest.raises(EngineError, match="cannot serve"):
            await engine.load(3, tmp_path / "missing")
        assert engine.weight_version == 1
        assert len((await _say(engine, _prompt(0))).token_ids) == 10
        await engine.close()

    asyncio.run(run())


def test_a_stop_token_ends_the_answer_and_is_part_of_it(policy):
    async def run() -> None:
        engine = _engine(policy)
        free = await _say(engine, _prompt(0), session="a")
        stop = free.token_ids[4]
        stopped = await _say(engine, _prompt(0), session="b", stop_ids=[stop])
        assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
        assert (free.stopped, stopped.stopped) == (False, True)
        await engine.close()

    asyncio.run(run())


def test_a_cancelled_request_frees_its_row(policy):
    async def run() -> None:
        engine = _engine(policy, sessions=1)
        long = asyncio.ensure_future(_say(engine, _prompt(0), 180, session="a"))
        await asyncio.sleep(0)
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        engine.release("a")
        assert len((await asyncio.wait_for(_say(engine, _prompt(1), session="b"), 30)).token_ids) == 10
        await engine.close()

    asyncio.run(run())


def test_a_context_that_cannot_fit_is_refused_with_its_length(policy):
    async def run() -> None:
        engine = _engine(policy)
        with pytest.raises(EngineError, match="191 tokens and 10 to sample"):
            await _say(engine, _prompt(0, 191))
        await engine.close()

    asyncio.run(run())


def test_a_failing_pass_fails_its_requests_and_not_the_next_ones(policy):
    async def run() -> None:
        engine = _engine(policy)
        with pytest.raises(EngineError, match="forward pass failed"):
            await _say(engine, [VOCABULARY + 5])
        assert len((await _say(engine, _prompt(0))).token_ids) == 10
        await engine.close()

    asyncio.run(run())


def test_a_closed_engine_answers_with_an_error(policy):
    async def run() -> None:
        engine = _engine(policy, sessions=1)
        waiting = [asyncio.ensure_future(_say(engine, _prompt(i), 180, session=f"{i}")) for i in range(3)]
        await asyncio.sleep(0)
        await engine.close()
        assert all(isinstance(e, EngineError) for e in await asyncio.gather(*waiting, return_exceptions=True))
        with pytest.raises(EngineError, match="closed"):
            await _say(engine, _prompt(0))

    asyncio.run(run())


def test_busy_time_is_shared_out_among_the_requests(policy):
    async def run() -> None:
        engine = _engine(policy)
        answers = await asyncio.gather(*(_say(engine, _prompt(i), 20, session=f"{i}") for i in range(6)))
        assert sum(a.accelerator_s for a in answers) == pytest.approx(engine.busy_s, rel=1e-6)
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("key", "value"), [("model_type", "mamba"), ("hidden_act", "gelu"), ("rope_parameters", {"rope_type": "yarn"})]
)
def test_an_architecture_that_would_be_computed_wrongly_is_refused(key, value, policy, tmp_path):
    config = json.loads((policy / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError):
        Llama(tmp_path)
