"""The run manifest at the learner: written after each checkpoint and publication, checked at start."""

from dataclasses import replace
from datetime import UTC, datetime

from infra.lake import Lake
from infra.run_manifests import (
    RunManifests,
    checkpoint_digest,
    evaluated_version,
    faults,
    settings_hash,
    table_versions,
)
from infra.telemetry import logger
from infra.weights import WeightStore
from schemas.errors import LakeError
from schemas.run_manifest import RunManifest
from schemas.settings import Settings
from trainers.checkpoint import Checkpoint, CheckpointError
from trainers.publish import check_order

_MEND = "Restore what is missing, or go on from the run manifest before it: `lagoon resume {}`"


class RunRecord:
    """Writes run manifests. `cluster` is the id of the Kafka cluster that the learner talks to."""

    def __init__(self, settings: Settings, lake: Lake, weights: WeightStore, cluster: str):
        self._settings, self._lake, self._weights, self._cluster = settings, lake, weights, cluster
        self._hash = settings_hash(settings)
        self._manifests = RunManifests(lake)

    def write(self, checkpoint: Checkpoint) -> RunManifest:
        """Write down what belongs to `checkpoint`, whose weights are published."""
        state, cursor = checkpoint.state, checkpoint.cursor
        version = self._weights.latest()
        return self._manifests.write(
            RunManifest(
                run=self._settings.run.name,
                life=self._settings.run.life,
                settings_sha256=self._hash,
                incarnation=state.incarnations[-1].name,
                train_step=state.step,
                checkpoint=checkpoint.folder.name,
                checkpoint_sha256=checkpoint_digest(checkpoint.folder),
                weight_version=version,
                weights_sha256=self._weights.digest(version),
                fingerprint=self._weights.manifest(version).fingerprint,
                tables=table_versions(self._lake),
                experience_version=cursor.experience_version,
                ledger_version=cursor.ledger_version,
                evaluated_version=evaluated_version(self._lake),
                mlflow_run=state.mlflow_run,
                kafka_cluster=self._cluster,
                offsets=cursor.offsets,
                created_at=datetime.now(UTC),
            )
        )

    def catch_up(self, checkpoint: Checkpoint) -> None:
        """Write the manifest that a crash between publication and manifest left out."""
        newest = next(self._manifests.newest_first([]), None)
        if newest is None or newest.checkpoint != checkpoint.folder.name:
            self.write(checkpoint)


def agreed(settings: Settings, newest: Checkpoint | None) -> Checkpoint | None:
    """`newest`, once the newest run manifest, the lake and the weight store agree with it.

    A manifest may say that the run goes on from a checkpoint under a later weight version than it made: versions that
    came of steps which a resume has undone keep their numbers.

    Raises:
        CheckpointError: the manifest names a later checkpoint, or this one with other content.
        LakeError: no manifest is intact, or the lake or the weight store lacks something that the manifest names.
        WeightStoreError: the store is ahead of the checkpoint, or has lost versions.
    """
    manifest = _newest(RunManifests(Lake.of(settings)))
    if manifest is not None:
        newest = _compared(settings, manifest, newest)
    check_order(newest.state if newest else None, WeightStore.of(settings).latest())
    return newest


def _newest(manifests: RunManifests) -> RunManifest | None:
    damaged: list[str] = []
    manifest = next(manifests.newest_first(damaged), None)
    for fault in damaged:
        logger("learner").warning("run manifest passed over", reason=fault)
    if manifest is None and damaged:
        raise LakeError(
            f"none of the {len(damaged)} run manifests in {manifests.uri} is intact; the newest: {damaged[0]}. Restore "
            "one, or remove them all to go on from the newest checkpoint unchecked"
        )
    return manifest


def _compared(settings: Settings, manifest: RunManifest, newest: Checkpoint | None) -> Checkpoint:
    mend = _MEND.format(settings.run.name)
    if newest is None or newest.folder.name < manifest.checkpoint:
        found = newest.folder.name if newest else "none"
        raise CheckpointError(
            f"run manifest {manifest.sequence} names checkpoint {manifest.checkpoint}; the newest complete one in "
            f"{settings.checkpoints} is {found}. {mend}"
        )
    if missing := faults(manifest, Lake.of(settings), WeightStore.of(settings)):
        raise LakeError(f"run manifest {manifest.sequence} does not fit: {'; '.join(missing)}. {mend}")
    if newest.folder.name != manifest.checkpoint:
        return newest  # a crash came between a later checkpoint and its manifest
    if checkpoint_digest(newest.folder) != manifest.checkpoint_sha256:
        raise CheckpointError(
            f"checkpoint {newest.folder} is another one than run manifest {manifest.sequence} names. {mend}"
        )
    version = max(newest.state.weight_version, manifest.weight_version)
    return replace(newest, state=newest.state.model_copy(update={"weight_version": version}))
