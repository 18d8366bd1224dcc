"""Versions that end their turns early, and an environment that any other token in an answer would score otherwise."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from inference.engines.llama import Llama
from inference.environments.base import Environment, Message, Score
from inference.environments.calls import Call
from inference.tokenizer import ChatTokenizer, make_tokenizer, save_tokenizer
from infra.fingerprints import fingerprint_file
from infra.weights import WeightStore, describe
from schemas.messages import Manifest, Probe
from tests.policies import write_policy
from tests.rollout_fakes import NOW

PROBE = (5, 9, 17, 33, 65)


class Odd(Environment):
    """Right where the bytes of the answer sum to an odd number."""

    def __init__(self, index: int) -> None:
        self._index = index

    def reset(self, seed: int) -> list[Message]:
        return [{"role": "user", "content": f"{self._index}"}]

    def parse(self, action: str) -> Sequence[Call]:
        return []

    async def score(self, answer: str) -> Score:
        return Score(float(sum(answer.encode()) % 2))


def build(family: str, index: int, seed: int, options: Mapping[str, Any]) -> Odd:
    return Odd(index)


def publish(store: WeightStore, folder: Path, version: int) -> None:
    """Random weights with tied embeddings, and a probe. The embedding of a turn's end is long: it is often likely."""
    policy = write_policy(folder, seed=version, tied=True)
    save_tokenizer(make_tokenizer([""]), policy)
    weights = load_file(policy / "model.safetensors")
    weights["model.embed_tokens.weight"][ChatTokenizer.load(policy).end_id] *= 2
    save_file(weights, policy / "model.safetensors", {"format": "pt"})
    manifest = Manifest(
        version=version,
        files=describe(policy),
        fingerprint=fingerprint_file(policy / "model.safetensors"),
        probe=Probe(token_ids=PROBE, logprobs=tuple(Llama(policy).logprobs(list(PROBE)))),
        created_at=NOW,
    )
    store.publish(policy, manifest)
