"""Section: the vLLM server of an engine."""

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.settings.base import Positive, Seconds, Section, Uri

_OWNED = {
    "model": "it is the weight version",
    "host": "the server listens on the loopback address",
    "port": "a free one is taken",
    "dtype": "set vllm.dtype",
    "max_model_len": "set rollout.max_tokens",
    "logprobs_mode": "behavior_logprobs must be those of the distribution that was sampled",
    "generation_config": "its top_p and top_k would renormalize the logprobs, and importance ratios be biased",
    "override_generation_config": "its top_p and top_k would renormalize the logprobs, and importance ratios be biased",
    "enable_prefix_caching": "turns of an episode reuse it",
    "enable_scale_out": "token ids in, token ids out",
    "enable_sleep_mode": "set vllm.share_device",
    "skip_tokenizer_init": "nothing is tokenized twice",
    "quantization": "every swap would have to quantize again, and no probe could tell its error from wrong weights",
    "worker_extension_cls": "weights are reloaded by Lagoon's",
}


class Vllm(Section):
    """The vLLM server, where `rollout.engine` or `evaluator.engine` is `vllm`."""

    url: Uri = ""
    """Of a server that runs already, with the same file system; without it each service starts its own."""
    python: str = ""
    """Interpreter that has vLLM; without it `.venv-vllm` (`make vllm`), else the one that runs Lagoon."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kv_cache_gib: Positive = 1
    """Room for keys and values on a CPU; a GPU's share is the argument `gpu_memory_utilization`."""
    start_timeout_s: Seconds = 300
    swap_timeout_s: Seconds = 60
    """Limit of loading weights in place; beyond it the server is started anew."""
    share_device: bool = False
    """Learner and rollout server take turns on the same card: the server sleeps while the learner trains. Mode sync."""
    arguments: dict[str, Any] = Field(default={})
    """Passed through to the server as flags, `max_num_seqs = 64` as `--max-num-seqs 64`; Lagoon's own are refused."""

    @model_validator(mode="after")
    def _owned(self) -> "Vllm":
        names = {key.replace("-", "_") for key in self.arguments}
        if taken := sorted(names & set(_OWNED)):
            reasons = "; ".join(f"{name}: {_OWNED[name]}" for name in taken)
            raise ValueError(f"vllm.arguments sets {taken}, which Lagoon owns; remove them ({reasons})")
        return self
