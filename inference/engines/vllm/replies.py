"""What a vLLM server answers, read strictly: a reply that does not say which version sampled which token is refused."""

from collections.abc import Sequence
from typing import Any

from inference.engines.base import EngineError, Generation
from schemas.trajectory import WeightVersionSpan

_FLOOR = -9999.0
"""vLLM writes this where a logprob is not finite."""


def generation(reply: Any, stop_ids: Sequence[int], temperature: float, accelerator_s: float) -> Generation:
    """The sampled tokens in a reply of `/inference/v1/generate`.

    Raises:
        EngineError: malformed, cut off by the server, not finite, or tokens without a weight version.
    """
    try:
        (choice,) = reply["choices"]
        token_ids = tuple(int(i) for i in choice["token_ids"])
        entries = choice["logprobs"]["content"]
        logprobs = tuple(float(e["logprob"]) for e in entries)
        spans = tuple(WeightVersionSpan(s["start"], s["end"], int(s["version"])) for s in choice["weight_versions"])
        sampled = tuple(int(e["token_id"]) for e in entries)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"the server's reply is malformed: {type(error).__name__}: {error}") from error
    if choice["finish_reason"] not in ("stop", "length"):
        raise EngineError(f"the server ended the request: {choice['finish_reason']}")
    if not token_ids or sampled != token_ids:
        raise EngineError(
            f"{len(token_ids)} tokens with {len(sampled)} logprobs; expected one each, of the same tokens"
        )
    if not all(_FLOOR < value <= 1e-3 for value in logprobs):
        raise EngineError("logprobs are not finite; the weights that are served are broken")
    if [s.start for s in spans] != [0, *(s.end for s in spans[:-1])] or spans[-1].end != len(token_ids):
        raise EngineError(f"weight version spans {spans} do not cover the {len(token_ids)} sampled tokens")
    certain = temperature == 0
    return Generation(
        token_ids, (0.0,) * len(token_ids) if certain else logprobs, spans, token_ids[-1] in stop_ids, accelerator_s
    )


def prompt_logprobs(reply: Any, token_ids: Sequence[int]) -> list[float]:
    """Logprobs of token_ids[1:] in a reply to a request for them.

    Raises:
        EngineError: malformed.
    """
    try:
        rows = reply["prompt_logprobs"][1:]
        return [float(row[str(token)]["logprob"]) for row, token in zip(rows, token_ids[1:], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"the server's prompt logprobs are malformed: {type(error).__name__}: {error}") from error
