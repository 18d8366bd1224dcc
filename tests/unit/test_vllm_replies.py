"""Replies of a vLLM server are read strictly; its time is shared out; its command line keeps what Lagoon owns."""

from pathlib import Path
from typing import Any

import pytest

from inference.engines.base import EngineError
from inference.engines.vllm import command, replies
from inference.engines.vllm.clock import Clock
from schemas.errors import SettingsError
from schemas.settings import Vllm, load
from schemas.trajectory import WeightVersionSpan

STOP = 9


def _reply(sampled: list[int], spans: list[tuple[int, int, str]], **changes: Any) -> dict[str, Any]:
    content = [{"token_id": i, "logprob": -0.5 * (n + 1)} for n, i in enumerate(sampled)]
    versions = [{"start": s, "end": e, "version": v} for s, e, v in spans]
    choice = {
        "finish_reason": "stop",
        "token_ids": sampled,
        "logprobs": {"content": content},
        "weight_versions": versions,
    }
    return {"choices": [choice | changes]}


def test_tokens_logprobs_and_versions_come_out_as_they_were_sampled() -> None:
    reply = _reply([4, 5, STOP], [(0, 2, "7"), (2, 3, "8")])
    made = replies.generation(reply, [STOP], 1.0, 0.25)
    assert (made.token_ids, made.logprobs) == ((4, 5, STOP), (-0.5, -1.0, -1.5))
    assert made.spans == (WeightVersionSpan(0, 2, 7), WeightVersionSpan(2, 3, 8))
    assert (made.stopped, made.accelerator_s) == (True, 0.25)


def test_a_turn_at_its_limit_has_not_stopped_and_temperature_0_leaves_no_choice() -> None:
    made = replies.generation(_reply([4, 5], [(0, 2, "7")], finish_reason="length"), [STOP], 0.0, 0.0)
    assert (made.stopped, made.logprobs) == (False, (0.0, 0.0))


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        ({}, "malformed"),
        (_reply([4], [(0, 1, "default")]), "malformed"),
        (_reply([4], [(0, 1, "7")], weight_versions=None), "malformed"),
        (_reply([4, 5], [(0, 1, "7")]), "do not cover"),
        (_reply([4, 5], [(0, 1, "7"), (0, 2, "8")]), "do not cover"),
        (_reply([4], [(0, 1, "7")], finish_reason="abort"), "ended the request: abort"),
        (_reply([], []), "0 tokens"),
        (_reply([4], [(0, 1, "7")], token_ids=[5]), "of the same tokens"),
        (_reply([4], [(0, 1, "7")], logprobs={"content": [{"token_id": 4, "logprob": -9999.0}]}), "not finite"),
        (_reply([4], [(0, 1, "7")], logprobs={"content": [{"token_id": 4, "logprob": float("nan")}]}), "not finite"),
    ],
)
def test_a_reply_that_does_not_say_which_version_sampled_what_is_refused(reply: dict[str, Any], fault: str) -> None:
    with pytest.raises(EngineError, match=fault):
        replies.generation(reply, [STOP], 1.0, 0.0)


def test_busy_time_is_divided_among_the_requests_in_flight() -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 8.0, 20.0, 21.0])
    clock = Clock(lambda: next(times))
    a = clock.enter()  # at 1
    b = clock.enter()  # at 3
    assert clock.leave(a) == 2 + 4 / 2  # at 7: alone for 2 s, one of two for 4 s
    assert clock.leave(b) == 4 / 2 + 1  # at 8
    c = clock.enter()  # at 20: nothing ran since 8
    assert clock.leave(c) == 1
    assert clock.busy_s == 7 + 1


def test_arguments_reach_the_server_and_those_that_lagoon_owns_are_refused_by_name() -> None:
    settings = Vllm(arguments={"max_num_seqs": 64, "enforce_eager": False})
    line = command.command(settings, Path("/models/v1"), 8123, 480)
    for pair in (("--max-num-seqs", "64"), ("--model", "/models/v1"), ("--max-model-len", "480"), ("--port", "8123")):
        assert line[line.index(pair[0]) + 1] == pair[1]
    assert "--no-enforce-eager" in line
    with pytest.raises(SettingsError, match=r"vllm.arguments sets \['max_model_len'\].*set rollout.max_tokens"):
        load([], ["--vllm.arguments={max-model-len=100}"])
    with pytest.raises(SettingsError, match=r"sets \['enable_sleep_mode'\].*set vllm.share_device"):
        load([], ["--vllm.arguments={enable_sleep_mode=true}"])


def test_a_quantized_engine_is_refused_since_a_second_reload_of_one_cannot_be_proven() -> None:
    # sgl-project/sglang#30749: it served raw scales
    with pytest.raises(SettingsError, match=r"sets \['quantization'\].*quantize again"):
        load([], ['--vllm.arguments={quantization="fp8"}'])


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_a_cut_distribution_is_refused_because_its_logprobs_are_renormalized(name: str) -> None:
    # probabilities 0.5, 0.4, 0.1 under top_p 0.9: the engine would report 0.5 / 0.9, a ratio of 0.9 at equal weights
    with pytest.raises(SettingsError, match="renormalizes the logprobs"):
        load([], [f"--rollout.{name}=0.9"])
