"""How a vLLM server is started: interpreter, flags, environment."""

import os
import sys
from pathlib import Path
from typing import Any

from infra.stack.ports import HOST
from infra.stack.programs import VLLM_PYTHON, has_gpu
from schemas.settings import Vllm

HERE = Path(__file__).parent
_CPU = {"enforce_eager": True, "block_size": 32, "distributed_executor_backend": "uni"}
"""Defaults where there is no GPU. Blocks of 128, vLLM's own, are longer than a turn, so that little is ever reused; a
worker inside the engine's process saves the start of one more."""


_CPU_OWNED = {"enable_chunked_prefill": False}
"""A seeded request that is read in parts ends the CPU engine: its random state cannot be wound back (vLLM 0.32)."""


def interpreter(settings: Vllm) -> str:
    """The Python that has vLLM: the setting, else `.venv-vllm` of this checkout, else the one that runs this."""
    return settings.python or (str(VLLM_PYTHON) if VLLM_PYTHON.exists() else sys.executable)


def command(settings: Vllm, folder: Path, port: int, max_tokens: int) -> list[str]:
    """The server's command line, for a model in `folder` and contexts of up to `max_tokens`."""
    owned = {
        "model": str(folder),
        "host": HOST,
        "port": port,
        "dtype": settings.dtype,
        "max_model_len": max_tokens,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: temperature included
        "generation_config": "vllm",  # no top_p of the model's own, which would renormalize the logprobs
        "enable_prefix_caching": True,
        "enable_scale_out": True,
        "skip_tokenizer_init": True,
        "uvicorn_log_level": "warning",  # not a line for each request
        "worker_extension_cls": "lagoon_reload.Reload",
    }
    given, needed = ({}, {"enable_sleep_mode": settings.share_device}) if has_gpu() else (_CPU, _CPU_OWNED)
    named = {key.replace("-", "_"): value for key, value in settings.arguments.items()}
    flags = [_flag(key, value) for key, value in (given | named | needed | owned).items()]
    module = "vllm.entrypoints.openai.api_server"  # the `vllm` command does not find itself in the CPU distribution
    return [interpreter(settings), "-m", module, *(part for flag in flags for part in flag)]


def environment(settings: Vllm, threads: int) -> dict[str, str]:
    """The server's environment, on top of this process's."""
    extension = str(HERE / "extension")
    cpu = {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # others want the same cores
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or `uni` is overruled
        "TORCH_COMPILE_DISABLE": "1",  # the first request would wait for a compiler
    }
    return {
        **os.environ,
        "PYTHONPATH": extension,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_SERVER_DEV_MODE": "1",  # pause, reload and resume exist only there; the server is on loopback
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **({} if has_gpu() else cpu),
    }


def _flag(key: str, value: Any) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]
