"""Publishing: weights of a complete checkpoint to the store, then the news to Kafka and MLflow."""

from datetime import datetime
from functools import cached_property
from pathlib import Path

from infra.kafka import Producer
from infra.telemetry import logger
from infra.tracking import Tracking
from infra.weights import Adapters, WeightStore, describe
from infra.weights import fingerprint_file as fingerprint
from schemas.errors import BrokerError, WeightStoreError
from schemas.messages import Manifest, Probe, WeightSummary
from schemas.settings import Learner
from schemas.topics import WEIGHTS
from trainers.checkpoint import POLICY, Checkpoint, State

BASE = 1
"""The version that adapters are merged into: the starting policy, published before the first step."""


def sync_interval(learner: Learner, step: int) -> int:
    """Steps between publications at `step`: from `sync_interval_start` to `sync_interval` over `sync_anneal_steps`."""
    progress = min(1.0, step / learner.sync_anneal_steps)
    return round(learner.sync_interval_start + (learner.sync_interval - learner.sync_interval_start) * progress)


def is_due(learner: Learner, step: int, published_step: int) -> bool:
    """Whether the weights after `step` are to be published: the interval is over, or training is."""
    return step - published_step >= sync_interval(learner, step) or step >= learner.num_train_steps


def manifest(checkpoint: Path, state: State, delta_version: int, probe: Probe, created_at: datetime) -> Manifest:
    """The manifest of the weights in folder `checkpoint`, to be published as the version of `state`."""
    folder = checkpoint / POLICY
    return Manifest(
        version=state.weight_version,
        parent=state.weight_version - 1 or None,
        files=describe(folder),
        fingerprint=fingerprint(folder / "model.safetensors"),
        probe=probe,
        train_step=state.step,
        delta_version=delta_version if delta_version >= 0 else None,
        mlflow_run=state.mlflow_run,
        checkpoint=checkpoint.name,
        created_at=created_at,
    )


def check_order(state: State | None, newest: int) -> None:
    """Refuse to train beside a weight store that is not what the checkpoints made.

    A version is published after its checkpoint, so the store is never ahead; behind by one only where a crash came
    between the two.

    Raises:
        WeightStoreError: the store is ahead of the newest checkpoint, or has lost versions.
    """
    version = state.weight_version if state else 0
    pending = state is not None and state.publication is not None
    if newest > version:
        raise WeightStoreError(
            f"the weight store has version {newest}, the newest checkpoint made version {version}: checkpoints come "
            "first, so some are gone, or another learner writes here. Restore the run's checkpoints folder, or start a "
            "new run under another run.name"
        )
    if newest < version - (1 if pending else 0):
        raise WeightStoreError(
            f"the weight store has version {newest}, the newest checkpoint made version {version}: versions are gone "
            "from the store. Restore them, or start a new run under another run.name"
        )


class Publisher:
    """Publishes checkpoints and tells the others; what Kafka has not taken is told again.

    Folder `cache` is for the version that adapters are merged into.
    """

    def __init__(self, store: WeightStore, producer: Producer, tracking: Tracking, cache: Path):
        self._store, self._producer, self._tracking, self._cache = store, producer, tracking, cache
        self._untold: list[WeightSummary] = []
        self._told = 0
        self._before: tuple[int, Path] | None = None
        self._log = logger("learner")

    def publish(self, checkpoint: Checkpoint) -> None:
        """Make the version of `checkpoint` visible; a no-op where it has been, but for telling again.

        Raises:
            WeightStoreError: the version exists with other content.
        """
        published = checkpoint.state.publication
        if published is None:
            return
        adapters = self._adapters(checkpoint, published)
        new = self._store.publish(checkpoint.policy, published, self._parent(published), adapters)
        self._before = published.version, checkpoint.policy
        stored = self._store.manifest(published.version)
        if adapters and stored.kind != "adapters":
            self._log.warning("adapters save too little, or do not make the version: all weights are published")
        self._untold.append(_summary(stored))
        self._told = published.version
        self.tell()
        lineage = {"fingerprint": published.fingerprint, "train_step": str(published.train_step)}
        lineage |= {"delta_version": str(published.delta_version), "parent": str(published.parent)}
        self._tracking.weight_version(published.version, self._store.version_uri(published.version), lineage)
        self._tracking.alias("latest", published.version)
        shown = {"kind": stored.kind, "num_bytes": stored.num_bytes, "new": new}
        self._log.info("published", version=published.version, step=published.train_step, **shown)

    def remind(self) -> None:
        """Tell the newest version once more: a log that was lost, or begins anew, has not heard of it."""
        newest = self._store.latest()
        if newest == self._told:
            return
        try:
            self._untold.append(_summary(self._store.manifest(newest)))
        except WeightStoreError as error:  # services pass it over too, and the next version is told as ever
            self._log.warning("the newest version is damaged and not told", version=newest, error=str(error))
        self.tell()

    def tell(self) -> None:
        """Send news that Kafka has not taken yet; the store is the truth, so this may be late."""
        untold, self._untold = self._untold, []
        for summary in untold:
            self._send(summary)

    def _parent(self, published: Manifest) -> Path | None:
        """The weights of the version before, where this life has published them and their checkpoint is still there."""
        if self._before is None or self._before[0] != published.parent or not self._before[1].exists():
            return None
        return self._before[1]

    def _adapters(self, checkpoint: Checkpoint, published: Manifest) -> Adapters | None:
        """The adapters of `checkpoint`, where there are some and the store has what they are merged into."""
        if checkpoint.adapters is None or published.version == BASE:
            return None
        try:
            return Adapters(checkpoint.adapters, self._base, self._store.manifest(BASE))
        except WeightStoreError as error:
            self._log.warning("no base for adapters: all weights are published", error=str(error))
            return None

    @cached_property
    def _base(self) -> Path:
        """The folder of what adapters are merged into. Hashed once a life: each version made of it is compared."""
        return self._store.fetch(BASE, self._cache)

    def _send(self, summary: WeightSummary) -> None:
        def delivered(error: BrokerError | None) -> None:
            if error is not None:
                self._untold.append(summary)

        self._producer.send(WEIGHTS.name, str(summary.version), summary.to_bytes(), on_delivery=delivered)


def _summary(published: Manifest) -> WeightSummary:
    return WeightSummary(
        version=published.version,
        parent=published.parent,
        kind=published.kind,
        fingerprint=published.fingerprint,
        num_bytes=published.num_bytes,
        train_step=published.train_step,
        mlflow_run=published.mlflow_run,
        created_at=published.created_at,
    )
