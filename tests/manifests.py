"""Run manifests, and runs to go on with, for tests."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra.lake import Lake
from infra.run_manifests import RunManifests, checkpoint_digest, table_versions
from infra.weights import WeightStore
from schemas.messages import Probe
from schemas.run_manifest import RunManifest
from schemas.settings import Settings
from tests.policies import write_policy
from trainers.checkpoint import POLICY, Checkpoint, Checkpoints, Incarnation, State
from trainers.publish import manifest
from trainers.stream import Cursor

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PROBE = Probe(token_ids=(1, 2), logprobs=(-1.0,))


def run_manifest(**values: Any) -> RunManifest:
    """A run manifest: `values`, and neutral ones elsewhere."""
    neutral = {
        "run": "r",
        "settings_sha256": "",
        "train_step": 0,
        "checkpoint": "step-00000000-v00000001",
        "checkpoint_sha256": "",
        "weight_version": 1,
        "weights_sha256": "",
        "fingerprint": "",
        "tables": {},
        "experience_version": -1,
        "ledger_version": -1,
        "created_at": NOW,
    }
    return RunManifest.model_validate(neutral | values)


def save_step(settings: Settings, step: int) -> Checkpoint:
    """A checkpoint at `step`, published as the next version, and its run manifest; as the learner does it."""
    lake, weights = Lake.of(settings), WeightStore.of(settings)
    lake.ensure()
    version = weights.latest() + 1
    checkpoints = Checkpoints(settings.checkpoints, 5, lambda: NOW)
    folder = checkpoints.begin(step, version)
    write_policy(folder / POLICY, seed=step, hidden=32, layers=1, mlp=32)
    life = Incarnation(name=f"life-{step}", resumed_from_step=0, started_at=NOW)
    state = State(step=step, weight_version=version, published_step=step, incarnations=(life,))
    made = manifest(folder, state, 0, PROBE, NOW)
    saved = checkpoints.complete(folder, state.model_copy(update={"publication": made}), Cursor())
    weights.publish(saved.policy, made)
    RunManifests(lake).write(named(settings, saved))
    return saved


def named(settings: Settings, saved: Checkpoint, **values: Any) -> RunManifest:
    """The manifest that names `saved` and the weights that it made."""
    lake, weights, version = Lake.of(settings), WeightStore.of(settings), saved.state.weight_version
    return run_manifest(
        **{
            "train_step": saved.state.step,
            "checkpoint": saved.folder.name,
            "checkpoint_sha256": checkpoint_digest(saved.folder),
            "weight_version": version,
            "weights_sha256": weights.digest(version),
            "tables": table_versions(lake),
        }
        | values
    )


def flip(path: Path) -> None:
    """Alter one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
