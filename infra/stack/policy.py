"""The starting policy: where the settings name none, a tiny one is made and warmed up, once for each kind of it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from infra.stack.health import last_line
from infra.stack.programs import python_path
from schemas.errors import StackError
from schemas.settings import ENVIRONMENT_FILE, Settings

LIMIT_S = 1800


def prepare_policy(settings: Settings, report: Callable[[str], None]) -> Path:
    """The folder of the starting policy in Hugging Face layout; made where it does not exist yet.

    Two one-shot processes make it: demonstrations first, then a warm start on them. The result is kept under
    `<data_dir>/policies`, by a hash of the settings that it depends on. Their output lines go to `report`.

    Raises:
        StackError: one of them fails, or takes longer than LIMIT_S.
    """
    if settings.policy.path:
        return Path(settings.policy.path)
    policies = Path(settings.run.data_dir).absolute() / "policies"
    target = policies / policy_key(settings)
    if target.exists():
        return target
    policies.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=policies) as temporary:
        made, shown = Path(temporary) / "policy", str(Path(temporary) / "demonstrations")
        saved = Path(temporary) / "settings.json"
        settings.save(saved)
        _one_shot(["inference.demonstrate", "--out", shown], saved, report)
        _one_shot(["trainers.warm_start", "--demonstrations", shown, "--out", str(made)], saved, report)
        if not target.exists():
            shutil.move(made, target)
    return target


def policy_key(settings: Settings) -> str:
    """A hash of all that the starting policy depends on: its shape, the task families, the seed."""
    relevant = settings.model_dump(
        mode="json", include={"policy": True, "families": True, "run": {"seed"}, "rollout": {"max_turns", "max_tokens"}}
    )
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


def _one_shot(command: list[str], saved: Path, report: Callable[[str], None]) -> None:
    environment = {**os.environ, ENVIRONMENT_FILE: str(saved), "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}
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
