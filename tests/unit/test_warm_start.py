"""The tiny policy: made, warmed up, written as a Hugging Face folder."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from schemas.errors import SettingsError
from schemas.settings import Policy, load
from trainers.policy import Scorer, export, load_policy, save_policy, tiny_llama
from trainers.warm_start import WARMUP_STEPS, learning_rate, warm_start

SETTINGS = load(
    overrides=[
        "--policy.hidden=32",
        "--policy.layers=1",
        "--policy.intermediate=32",
        "--policy.warm_start_steps=60",
        "--policy.warm_start_batch=8",
    ]
)
WORDS = ["<pad>", "<end>", "<ask>", "yes", "no"]


@pytest.fixture
def demonstrations(tmp_path: Path) -> Path:
    """After <ask> the demonstrator says yes and ends; the question is masked, and so is a false lead behind it."""
    folder = tmp_path / "shown"
    folder.mkdir()
    Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "<pad>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<pad>"}))
    rows = [([2, 3, 1], [False, True, True]), ([2, 2, 3, 1, 4], [False, False, True, True, False])] * 10
    ids, masks = zip(*rows, strict=True)
    table = pa.table(
        {
            "token_ids": pa.array(ids, pa.list_(pa.int32())),
            "action_mask": pa.array(masks, pa.list_(pa.bool_())),
            "behavior_logprobs": pa.array([[0.0] * len(i) for i in ids], pa.list_(pa.float32())),
        }
    )
    with pa.ipc.new_file(str(folder / "demonstrations.arrow"), table.schema) as writer:
        writer.write_table(table)
    return folder


def test_it_learns_the_actions_and_only_them(demonstrations: Path, tmp_path: Path) -> None:
    loss = warm_start(SETTINGS, demonstrations, tmp_path / "policy")
    assert loss < 0.2 < math.log(len(WORDS))
    scorer = Scorer(load_policy(tmp_path / "policy"))
    ids = torch.tensor([[2, 3, 1, 4]])
    with torch.no_grad():
        said, ended, lead = scorer(ids, torch.ones(1, 3, dtype=torch.bool)).exp().tolist()
    assert min(said, ended) > 0.8
    assert lead < 0.8  # the token behind the end was never an action


def test_the_folder_holds_what_an_engine_needs(demonstrations: Path, tmp_path: Path) -> None:
    warm_start(SETTINGS, demonstrations, tmp_path / "policy")
    names = {p.name for p in (tmp_path / "policy").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["eos_token_id"] == 1


def test_the_same_seed_gives_the_same_weights(demonstrations: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        warm_start(SETTINGS, demonstrations, tmp_path / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    policy = Policy(warm_start_steps=800, warm_start_learning_rate=3e-3)
    assert learning_rate(policy, 0) == pytest.approx(3e-3 / WARMUP_STEPS)
    assert learning_rate(policy, 400) == pytest.approx(3e-3 * 0.55)
    assert learning_rate(policy, 799) == pytest.approx(3e-3 * 0.1, rel=0.02)


def test_missing_demonstrations_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"demonstrations\.arrow"):
        warm_start(SETTINGS, tmp_path, tmp_path / "policy")


def test_a_hidden_size_without_whole_heads_is_refused() -> None:
    with pytest.raises(SettingsError, match="48"):
        tiny_llama(Policy(hidden=48), 8, 1, 0, seed=0)


def test_a_tied_head_is_written_once_and_read_back_equal(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    model = tiny_llama(Policy(hidden=32, layers=1, intermediate=32), 8, 1, 0, seed=0)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    save_policy(model, source, tmp_path / "tied", 1, 0)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    again = load_policy(tmp_path / "tied")
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_weights_and_manifests_of_the_source_are_not_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("MANIFEST.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"):
        (source / name).write_text("{}")
    model = tiny_llama(Policy(hidden=32, layers=1, intermediate=32), 8, 1, 0, seed=0)
    export(model, model.state_dict(), source, tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
