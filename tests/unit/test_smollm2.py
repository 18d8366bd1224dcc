"""SmolLM2 out of a GGUF file: names, order of rows, tokenizer; and what is said where its packages are missing."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from inference.tokenizer import ChatTokenizer
from infra.cli.demo import PROFILE, SMOLLM2_PROFILE
from infra.stack import policy, programs
from schemas.errors import SettingsError
from schemas.settings import load
from trainers.policy import Scorer, in_float32
from trainers.smollm2 import config_of, state_dict, write_tokenizer

LETTERS = ["a", "b", "1", "2", "Ġ", "ab", "Ġab", "12", "Ċ"]
FIELDS = {
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,  # 1e-5 as a float of 32 bits
    "llama.rope.freq_base": 100000.0,
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, *"user"],
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(LETTERS) + 4),
    "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.chat_template": "{{ messages }}",
}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _as_gguf(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The tensors as llama.cpp's converter writes them: rows of q and k of a head in pairs (`LlamaModel.permute`)."""
    tensors = {"token_embd.weight": model.model.embed_tokens.weight, "output_norm.weight": model.model.norm.weight}
    for number, layer in enumerate(model.model.layers):
        for name, short in GGUF_NAMES.items():
            tensor = layer.get_submodule(name).weight
            if heads := {"attn_q": 4, "attn_k": 2}.get(short):
                rows, columns = tensor.shape
                tensor = tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
            tensors[f"blk.{number}.{short}.weight"] = tensor
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def test_a_model_that_went_through_gguf_is_the_same_model() -> None:
    torch.manual_seed(0)
    config = config_of(FIELDS)
    assert (config.rms_norm_eps, config.head_dim, config.tie_word_embeddings) == (1e-5, 8, True)
    original, back = LlamaForCausalLM(config), LlamaForCausalLM(config)
    back.load_state_dict(state_dict(_as_gguf(original), FIELDS))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(original(ids).logits, back(ids).logits)


def test_the_tokenizer_has_chatml_and_each_digit_is_a_token(tmp_path: Path) -> None:
    write_tokenizer(FIELDS, tmp_path)
    tokenizer = ChatTokenizer.load(tmp_path)
    tokens = FIELDS["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in tokenizer.encode("ab ab12\n")] == ["ab", "Ġab", "1", "2", "Ċ"]
    assert [tokens[i] for i in tokenizer.encode("<|im_start|>a<|im_end|>")] == ["<|im_start|>", "a", "<|im_end|>"]
    assert tokenizer.stop_ids == (2,)
    assert tokenizer.decode(tokenizer.encode("ab ab12\n")) == "ab ab12\n"


def test_a_policy_without_its_packages_is_refused_with_the_make_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "SMOLLM2_PACKAGES", ("gguf_of_nobody", "torch"))
    wanted = [f"--run.data_dir={tmp_path}", "--policy.name=smollm2"]
    with pytest.raises(SettingsError, match=r"there is no gguf_of_nobody; install them with `make smollm2`"):
        policy.check_packages(load([], wanted))
    policy.check_packages(load([], [*wanted, f"--policy.path={tmp_path}"]))  # nothing has to be made
    (tmp_path / "policies" / f"smollm2-{policy.SMOLLM2_FINGERPRINT[:12]}").mkdir(parents=True)
    policy.check_packages(load([], wanted))


def test_an_engine_that_is_not_installed_is_refused_with_the_make_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "VLLM_PYTHON", tmp_path / "none")
    for section in ("rollout", "evaluator"):
        with pytest.raises(SettingsError, match=r"install it with `make vllm`"):
            policy.check_packages(load([], [f"--{section}.engine=vllm"]))
    policy.check_packages(load([], ["--rollout.engine=vllm", "--vllm.url=http://127.0.0.1:1"]))
    policy.check_packages(load([], ["--rollout.engine=torch"]))


def test_the_profile_is_of_a_real_model_on_a_real_server() -> None:
    settings = load([PROFILE, SMOLLM2_PROFILE])
    assert (settings.policy.name, settings.rollout.engine, settings.learner.precision) == ("smollm2", "vllm", "bf16")
    assert [f.name for f in settings.families] == ["add", "larger", "bfcl"]


def test_weights_in_bfloat16_are_scored_in_float32_and_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(FIELDS)).to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids, mask = torch.arange(12)[None], torch.ones(1, 11, dtype=torch.bool)
    with torch.no_grad():
        with in_float32(model):
            exact = Scorer(model)(ids, mask)
        rounded = Scorer(model)(ids, mask)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert torch.equal(exact, Scorer(model.float())(ids, mask))
    assert not torch.equal(exact, rounded)
