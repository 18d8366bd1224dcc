"""Rewards from a service: in batches across episodes, tried again, refused when they are nonsense; never a false 0."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from inference.environments.base import ToolUnavailable, build
from inference.graders.judge import JudgeOptions, judged
from inference.graders.limited import VerifierError
from inference.tools import guard
from schemas.errors import SettingsError
from tests.episodes import engine, episode, task
from tests.judge_server import JudgeServer, serving

pytestmark = pytest.mark.timeout(60)


async def _by_length(items: list[dict[str, Any]]) -> web.Response:
    return web.json_response({"scores": [min(1.0, len(i["answer"]) / 10) for i in items]})


def _says(text: str, status: int = 200):
    async def behavior(items: list[dict[str, Any]]) -> web.Response:
        return web.Response(text=text, status=status, content_type="application/json")

    return behavior


def _options(server: JudgeServer, **options: Any) -> JudgeOptions:
    return JudgeOptions(url=server.url, **options)


def test_answers_of_many_episodes_go_in_one_request_and_get_their_own_scores(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i} letters", "reference": i}) + "\n" for i in range(5)))

    async def run() -> None:
        async with serving(_by_length) as server:
            options = {"prompts": str(prompts), "judge": {"url": server.url, "batch_window_s": 10, "max_batch": 5}}
            rows = await asyncio.gather(
                *(episode(task("judged", "letters", i, **options), engine("x" * i)) for i in range(5))
            )
            assert [row.reward for row in rows] == [0.0, 0.1, 0.2, 0.3, 0.4]
            (items,) = server.requests
            assert sorted(i["reference"] for i in items) == [0, 1, 2, 3, 4]
            assert {"prompt": "say 3 letters", "reference": 3, "answer": "xxx"} in items

    asyncio.run(run())


def test_a_judge_that_fails_is_asked_again():
    async def run() -> None:
        failures = iter([503, 429, 500])

        async def behavior(items: list[dict[str, Any]]) -> web.Response:
            status = next(failures, 200)
            return web.Response(status=status) if status != 200 else await _by_length(items)

        async with serving(behavior) as server:
            assert await judged(_options(server), {"answer": "xxxxx"}) == 0.5
            assert len(server.requests) == 4

    asyncio.run(run())


def test_a_judge_that_hangs_is_left_at_its_limit_and_earns_nobody_a_zero(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "speak"}\n')

    async def hang(items: list[dict[str, Any]]) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        async with serving(hang) as server:
            options = {"prompts": str(prompts), "judge": {"url": server.url, "timeout_s": 1, "retries": 1}}
            row = await episode(task("judged", **options), engine("hello"))
            assert (row.status, row.error_kind, row.reward) == ("failed", "verifier", None)
            assert "did not answer within 1 s" in (row.error or "")
            assert len(server.requests) == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ('{"scores": [NaN, 1]}', "score nan"),
        ('{"scores": [0.5, 1.5]}', "score 1.5"),
        ('{"scores": [true, 1]}', "score True"),
        ('{"scores": ["1", 1]}', "score '1'"),
        ('{"scores": [1]}', "gave 1 scores for 2 items"),
        ('{"scores": {"0": 1, "1": 1}}', "gave dict scores"),
        ('{"rewards": [1, 1]}', "has no scores"),
        ("[1, 1]", "has no scores"),
        ("<html>busy</html>", "has no scores"),
        ("x" * (2 << 20), "exceeds"),
    ],
    ids=range(10),
)
def test_nonsense_is_refused_for_the_whole_batch_without_asking_again(reply, words):
    async def run() -> None:
        async with serving(_says(reply)) as server:
            options = _options(server, max_batch=2, batch_window_s=10)
            for outcome in await asyncio.gather(
                *(judged(options, {"answer": a}) for a in "ab"), return_exceptions=True
            ):
                assert isinstance(outcome, VerifierError)
                assert words in str(outcome)
            assert len(server.requests) == 1

    asyncio.run(run())


def test_a_request_that_the_judge_refuses_is_not_repeated():
    async def run() -> None:
        async with serving(_says("no such model", 404)) as server:
            with pytest.raises(VerifierError, match="answered 404: b'no such model'"):
                await judged(_options(server), {"answer": "a"})
            assert len(server.requests) == 1

    asyncio.run(run())


def test_a_judge_that_is_down_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guard, "COOL_S", 3600)

    async def run() -> None:
        async with serving(_says("", 500)) as server:
            options = _options(server, retries=0, batch_window_s=0)
            for _ in range(guard.BREAK_AFTER + 3):
                with pytest.raises(ToolUnavailable):
                    await judged(options, {"answer": "a"})
            assert len(server.requests) == guard.BREAK_AFTER

    asyncio.run(run())


def test_the_secret_comes_from_the_environment(monkeypatch, tmp_path: Path):
    async def run() -> None:
        async with serving(_by_length) as server:
            await judged(_options(server, token_variable="JUDGE_SECRET"), {"answer": "a"})
            assert server.tokens == ["Bearer hush"]

    monkeypatch.setenv("JUDGE_SECRET", "hush")
    asyncio.run(run())
    monkeypatch.delenv("JUDGE_SECRET")
    judge = {"url": "http://127.0.0.1:1/", "token_variable": "JUDGE_SECRET"}
    with pytest.raises(SettingsError, match="JUDGE_SECRET is not set"):
        build("judged", "family", 0, 0, {"prompts": str(tmp_path / "none"), "judge": judge})


@pytest.mark.parametrize("text", ["not JSON", "[]", '{"prompt": 3}', ""], ids=["json", "list", "number", "too few"])
def test_a_file_that_has_no_such_prompt_stops_a_service_at_its_start(tmp_path: Path, text: str):
    (tmp_path / "prompts.jsonl").write_text(text)
    options = {"prompts": str(tmp_path / "prompts.jsonl"), "judge": {"url": "http://127.0.0.1:1/"}}
    with pytest.raises(SettingsError, match="prompts"):
        build("judged", "family", 0, 0, options)
