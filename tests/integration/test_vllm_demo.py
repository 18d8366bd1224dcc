"""`lagoon demo` on a real vLLM server: the whole loop, in a short form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infra.stack import programs
from infra.stack.bring_up import take_down
from schemas.settings import load
from tests.vllm_server import needs_vllm

pytestmark = [pytest.mark.kafka, pytest.mark.slow, needs_vllm, pytest.mark.timeout(1200)]

STEPS = 5
SHORT = (
    "--rollout.engine=vllm",
    f"--learner.num_train_steps={STEPS}",
    "--loop.max_staleness=1",  # so that steps 3 and 5 wait for samples of versions after 1 and after 3
    "--learner.sync_interval_start=1",
    "--learner.sync_interval=1",
    "--loop.batch_size=32",
    "--evaluator.samples_per_family=4",
)
LIMIT_S = 1000.0


def test_the_loop_on_vllm_swaps_in_flight_proves_every_load_and_balances(tmp_path: Path, demo_policy: Path) -> None:
    data_dir = tmp_path / "data"
    own = [f"--run.data_dir={data_dir}", f"--policy.path={demo_policy}"]
    command = [sys.executable, "-m", "infra.cli.main", "demo", *own, *SHORT]
    try:
        demo = subprocess.run(command, cwd=programs.ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert demo.returncode == 0, (demo.stdout + demo.stderr)[-3000:]
    finally:
        take_down(str(data_dir), lambda _: None)
    summary = json.loads((data_dir / "current" / "summary.json").read_text())
    assert all(row["balanced"] for row in (*summary["conservation"].values(), summary["work"]))
    assert summary["train_steps"] == STEPS
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    settings = load([data_dir / "current" / "settings.json"])
    served = proven_by(settings.run.folder / "cache" / "rollout-0" / "proofs.jsonl")
    assert served[0] == 1
    assert len(served) > 2, "a swap while rollouts are under way"
    assert summary["probes"]["exact"] == summary["probes"]["loads"] >= len(served)


def proven_by(proofs: Path) -> list[int]:
    """The weight versions of loads that the probe found exact, in order."""
    lines = [json.loads(line) for line in proofs.read_text().splitlines()]
    return [line["version"] for line in lines if line["exact"]]
