"""The vLLM engine on a real server: the torch model's numbers, exact spans, swaps that lose and forget nothing."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import pytest

from inference.engines.base import EngineError, Generation
from inference.engines.torch_engine import TorchEngine
from inference.engines.vllm.client import Client
from inference.engines.vllm.engine import VllmEngine
from inference.serving import prove
from infra.turns import Turn
from infra.weights import WeightStore
from schemas.errors import WeightStoreError
from schemas.messages import Probe
from schemas.settings import Settings
from schemas.trajectory import WeightVersionSpan
from tests.odd_answers import publish
from tests.rollout_fakes import manifest
from tests.unit.test_evaluator import Setup
from tests.vllm_server import MAX_TOKENS, TOLERANCE, Running, errors, needs_vllm, prompt, running, say

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from running(tmp_path_factory.mktemp("vllm"))


def test_sampled_tokens_have_the_logprobs_of_the_torch_model_at_any_temperature(server: Running) -> None:
    async def run(engine: VllmEngine) -> None:
        ids = prompt(1)
        plain = await say(engine, ids, 60)
        assert max(errors(plain, ids, server.policies.models)) < TOLERANCE
        assert plain.spans == (WeightVersionSpan(0, 60, 1),)
        again = await say(engine, ids, 60)
        assert again.token_ids == plain.token_ids  # same seed
        other = await say(engine, ids, 60, seed=4)
        assert other.token_ids != plain.token_ids

        half = await say(engine, ids, 20, temperature=0.5)
        model = server.policies.models[1]
        logits = _logits(model, [*ids, *half.token_ids])[len(ids) - 1 : -1]
        expected = (logits / 0.5).log_softmax(-1)  # of the logits, not of the logprobs
        assert half.logprobs == pytest.approx(
            [row[t].item() for row, t in zip(expected, half.token_ids, strict=True)], abs=TOLERANCE
        )

        greedy = await say(engine, ids, 20, temperature=0.0)
        best = _logits(model, [*ids, *greedy.token_ids])[len(ids) - 1 : -1].argmax(-1).tolist()
        assert (list(greedy.token_ids), set(greedy.logprobs)) == (best, {0.0})
        assert await engine.score(ids) == pytest.approx(model.logprobs(ids), abs=TOLERANCE)

    _with(server, run)


def test_a_turn_ends_with_its_stop_token_or_at_its_limit(server: Running) -> None:
    async def run(engine: VllmEngine) -> None:
        ids = prompt(2)
        free = await say(engine, ids, 30)
        stop = free.token_ids[10]
        first = free.token_ids.index(stop)
        stopped = await say(engine, ids, 30, stop_ids=(stop,))
        assert (stopped.token_ids, stopped.stopped) == (free.token_ids[: first + 1], True)
        assert not free.stopped
        with pytest.raises(EngineError, match=f"at most {MAX_TOKENS}"):
            await say(engine, prompt(2, MAX_TOKENS), 1)

    _with(server, run)


def test_spans_across_a_swap_in_mid_turn_say_exactly_which_weights_sampled_each_token(server: Running) -> None:
    async def run(engine: VllmEngine) -> None:
        prompts = [prompt(i, 20 + i) for i in range(8)]
        turns = await _begun(server, *(say(engine, ids, 400, seed=i) for i, ids in enumerate(prompts)))
        await engine.load(2, server.policies.folders[2])
        said = await asyncio.gather(*turns)
        crossed = [(ids, g) for ids, g in zip(prompts, said, strict=True) if len(g.spans) == 2]
        assert crossed, [g.spans for g in said]
        models = server.policies.models
        one_off: list[float] = []
        for ids, generation in crossed:
            assert [s.version for s in generation.spans] == [1, 2]
            assert max(errors(generation, ids, models)) < TOLERANCE
            boundary = generation.spans[1].start
            one_off.append(errors(generation, ids, models, shift=1)[boundary])
            one_off.append(errors(generation, ids, models, shift=-1)[boundary - 1])
        assert median(one_off) > 10 * TOLERANCE  # plainly wrong; for a single token both versions may agree

    _with(server, run)


def test_a_swap_leaves_nothing_of_the_old_weights_in_the_prefix_cache(server: Running) -> None:
    async def run(engine: VllmEngine) -> None:
        ids = prompt(3, 200)
        await say(engine, ids, 20, temperature=0.0)
        assert await _cached(server, say(engine, ids, 20, temperature=0.0)) > 150  # within a version it is reused
        (turn,) = await _begun(server, say(engine, prompt(4), 400))  # in flight: its blocks are held during the swap
        await engine.load(2, server.policies.folders[2])
        answer = say(engine, ids, 20)
        assert await _cached(server, answer) == 0
        second = await say(engine, ids, 20)
        assert max(errors(second, ids, server.policies.models)) < TOLERANCE
        assert second.spans == (WeightVersionSpan(0, 20, 2),)
        await turn

    _with(server, run)


def test_every_swap_of_several_gives_what_a_fresh_load_gives(server: Running) -> None:
    async def run(engine: VllmEngine) -> None:
        ids = prompt(8)
        for version in (2, 1, 2):
            await engine.load(version, server.policies.folders[version])
            generation = await say(engine, ids, 20)
            assert generation.spans == (WeightVersionSpan(0, 20, version),)
            assert max(errors(generation, ids, server.policies.models)) < TOLERANCE

    _with(server, run)


def test_of_64_requests_during_a_swap_all_are_answered(server: Running) -> None:
    async def run(engine: VllmEngine) -> None:
        before = await _begun(server, *(say(engine, prompt(i), 60, seed=i) for i in range(16)))
        swap = asyncio.create_task(engine.load(2, server.policies.folders[2]))
        during: list[asyncio.Task[Generation]] = []
        while len(during) < 64:
            during.append(asyncio.create_task(say(engine, prompt(len(during)), 20, seed=1)))
            await asyncio.sleep(0.001)
        await swap
        said = await asyncio.gather(*before, *during)
        assert sum(len(g.token_ids) for g in said) == 16 * 60 + 64 * 20
        prompts = [prompt(i) for i in (*range(16), *range(64))]
        worst = [max(errors(g, ids, server.policies.models)) for g, ids in zip(said, prompts, strict=True)]
        assert max(worst) < TOLERANCE

    _with(server, run)


def test_weights_that_cannot_be_loaded_leave_the_old_ones_and_the_requests_in_flight(
    server: Running, tmp_path: Path
) -> None:
    async def run(engine: VllmEngine) -> None:
        ids = prompt(5)
        (turn,) = await _begun(server, say(engine, ids, 300))
        with pytest.raises(EngineError, match="collective_rpc"):
            await engine.load(2, tmp_path)
        assert (engine.weight_version, engine.fault) == (1, "")
        generation = await turn
        assert {s.version for s in generation.spans} == {1}
        assert max(errors(generation, ids, server.policies.models)) < TOLERANCE

    _with(server, run)


def test_a_reload_that_misses_the_tied_head_is_found_out_by_the_probe_and_lagoons_own_is_exact(server: Running) -> None:
    async def run(engine: VllmEngine) -> None:
        ids, models = prompt(6), server.policies.models
        probe = Probe(token_ids=tuple(ids), logprobs=tuple(models[2].logprobs(ids)))
        published = manifest(2).model_copy(update={"probe": probe})
        await engine.score(ids)  # takes the server over
        client = Client(server.url)
        try:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(server.policies.folders[2])}}
            await client._ask("POST", "/collective_rpc", body, 60)  # what plain vLLM offers; it answers 200
        finally:
            await client.close()
        with pytest.raises(WeightStoreError, match="version 2 is loaded but not proven"):
            await prove(engine, published, 2e-3)
        await engine.load(2, server.policies.folders[2])
        await prove(engine, published, TOLERANCE)

    _with(server, run)


def test_a_server_sleeps_between_episodes_while_the_learner_has_the_card_and_wakes_up_unchanged(
    server: Running, tmp_path: Path
) -> None:
    """On a CPU vLLM moves nothing when it sleeps; it stops scheduling, and drops its prefix cache."""
    learners, ids = Turn(tmp_path / "turn"), prompt(9, 100)

    async def until(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(60):
            while not await condition():
                await asyncio.sleep(0.02)

    async def can_train() -> bool:
        return learners.take()

    async def run() -> None:
        engine, client = server.engine(turn=Turn(tmp_path / "turn")), Client(server.url)
        try:
            first = await say(engine, ids, 20)
            await asyncio.sleep(1)  # longer than an idle server stays awake; the episode goes on
            assert (learners.take(), await client.is_sleeping()) == (False, False)
            engine.release("s")
            await until(can_train)
            assert await client.is_sleeping()
            again = asyncio.create_task(say(engine, ids, 20))
            await asyncio.sleep(1)
            assert (again.done(), await client.is_sleeping()) == (False, True)
            learners.release()
            assert (await again).token_ids == first.token_ids
            assert max(errors(await again, ids, server.policies.models)) < TOLERANCE
            engine.release("s")
            await until(client.is_sleeping)
            await engine.load(2, server.policies.folders[2])  # wakes up for it
            second = await say(engine, ids, 20)
            assert max(errors(second, ids, server.policies.models)) < TOLERANCE
            assert second.spans == (WeightVersionSpan(0, 20, 2),)
        finally:
            await engine.close()
            await client.close()
        assert learners.take()

    asyncio.run(run())


def test_a_cancelled_request_is_aborted_in_the_server(server: Running) -> None:
    async def run(engine: VllmEngine) -> None:
        (turn,) = await _begun(server, say(engine, prompt(7), 430))
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        async with asyncio.timeout(30):
            while await _metric(server, "vllm:num_requests_running") > 0:
                await asyncio.sleep(0.02)
        generation = await say(engine, prompt(7), 5)
        assert not math.isnan(sum(generation.logprobs))

    _with(server, run)


def test_a_greedy_evaluation_gives_the_scores_of_the_torch_engine_side_by_side(server: Running, tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "store"))
    settings = Settings.model_validate(
        {
            "families": [{"name": "odd", "environment": "tests.odd_answers:build", "num_tasks": 60}],
            "evaluator": {"temperature": 0, "samples_per_family": 12, "full_samples_per_family": 12, "full_every": 1},
            "rollout": {"max_tokens": MAX_TOKENS, "max_turn_tokens": 60},
        }
    )
    torch_engine = partial(TorchEngine, max_sessions=12, max_tokens=MAX_TOKENS)
    setup = Setup(tmp_path, cast(Any, store), light=server.engine, full=torch_engine, settings=settings)

    async def run() -> None:
        for version in (1, 2):
            publish(store, tmp_path / f"v{version}", version)
            await asyncio.gather(*(setup.evaluator.run(job) for job in setup.due()))
        await setup.close()

    asyncio.run(run())
    assert sorted(key for topic, key, _ in setup.sent if topic == "evals") == ["1/full", "1/light", "2/full", "2/light"]
    scores = {(r.kind, r.end_version): (r.score, r.num_scored, r.num_tokens) for r in setup.results}
    assert [scores["light", v] for v in (1, 2)] == [scores["full", v] for v in (1, 2)]
    assert scores["light", 1] != scores["light", 2]
    assert all(0 < (score or 0) < 1 and num_scored == 12 for score, num_scored, _ in scores.values())


def _logits(model, ids: list[int]):  # type: ignore[no-untyped-def]
    import torch  # noqa: PLC0415

    positions = torch.arange(len(ids)).unsqueeze(0)
    hidden = model.forward(torch.tensor([ids]), positions, model.cache(1, len(ids)), slice(0, 1))
    return model.logits(hidden[0])


async def _begun(server: Running, *turns: Coroutine[Any, Any, Generation]) -> list[asyncio.Task[Generation]]:
    """Tasks of `turns`, once the server has sampled a token for one of them."""
    name = "vllm:generation_tokens_total"
    before = await _metric(server, name)
    tasks = [asyncio.create_task(turn) for turn in turns]
    async with asyncio.timeout(60):
        while await _metric(server, name) == before:
            await asyncio.sleep(0.005)
    return tasks


async def _metric(server: Running, name: str) -> float:
    client = Client(server.url)
    try:
        lines = (await client.metrics()).splitlines()
    finally:
        await client.close()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


async def _cached(server: Running, request) -> float:  # type: ignore[no-untyped-def]
    """Context tokens that `request` found in the prefix cache."""
    before = await _metric(server, "vllm:prefix_cache_hits_total")
    await request
    return await _metric(server, "vllm:prefix_cache_hits_total") - before


def _with(server: Running, use) -> None:  # type: ignore[no-untyped-def]
    async def run() -> None:
        engine = server.engine()
        try:
            await engine.score(prompt(0))
            await use(engine)
        finally:
            await engine.close()

    asyncio.run(run())
