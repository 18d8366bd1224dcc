"""One consistent state of a run, as the learner writes it down after each checkpoint and publication."""

import hashlib
from datetime import datetime
from typing import Literal

from pydantic import Field

from schemas.messages import Count, Message, Name


class RunManifest(Message):
    """What belongs together: lake, weights, checkpoint, evaluator, MLflow run, and the place in Kafka's log.

    `tables` are Delta versions that the lake had at least. `offsets` are, by `topic/partition`, the first offset of
    trajectories that had no outcome in the lake yet, as far as the learner had read it. `checkpoint` is a name, not a
    path, and `checkpoint_sha256` the hash of its manifest, which holds the hashes of its files; so is it with the
    weights. `sha256` is over all the other fields.
    """

    sequence: Count = 0
    reason: Literal["checkpoint", "resume"] = "checkpoint"
    run: Name
    life: Count = 0
    settings_sha256: str
    incarnation: str | None = None
    train_step: Count
    checkpoint: Name
    checkpoint_sha256: str
    weight_version: Count
    weights_sha256: str
    fingerprint: str
    tables: dict[str, int]
    experience_version: int
    ledger_version: int
    evaluated_version: Count = 0
    mlflow_run: str | None = None
    kafka_cluster: str | None = None
    offsets: dict[str, int] = Field(default_factory=dict)
    created_at: datetime
    sha256: str = ""

    def sealed(self) -> "RunManifest":
        """The manifest with the hash of its content."""
        return self.model_copy(update={"sha256": self._hash()})

    @property
    def is_intact(self) -> bool:
        """Whether the content is what was sealed."""
        return self.sha256 == self._hash()

    def _hash(self) -> str:
        return hashlib.sha256(self.model_copy(update={"sha256": ""}).to_bytes()).hexdigest()
