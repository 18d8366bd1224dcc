"""Sections: the run, and the systems that hold its data."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.settings.base import Positive, Ratio, Seconds, Section, StorageOptions, Uri, is_secret


class Run(Section):
    """Which run this is, and where its files live."""

    name: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data_dir: str = ".lagoon"
    seed: int = 0
    life: int = Field(default=0, ge=0)
    """Logs that the run has had before this one; `lagoon resume` counts it up where Kafka's log was lost."""

    def in_this_life(self, name: str) -> str:
        """`name` as it is told apart from the same one in the run's earlier logs: `trajectories@1`."""
        return f"{name}@{self.life}" if self.life else name

    @property
    def folder(self) -> Path:
        """The run's folder: settings, logs, outboxes, recovery state, checkpoints, summary."""
        return Path(self.data_dir).absolute() / "runs" / self.name


class Kafka(Section):
    """The broker. Without `brokers` the local stack starts one."""

    brokers: str = ""
    topic_prefix: str = Field(default="", pattern=r"^[A-Za-z0-9._-]*$")
    partitions: Literal[1, 2, 4, 8, 16] = 4
    replication: Positive = 1
    retention_h: Positive = 168
    max_message_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    compression: Literal["uncompressed", "producer"] = "uncompressed"
    """How topics keep batches, which producers send compressed. "producer": as they come, in a fourth or fifth of the
    room; the broker then limits them compressed only, so every writer has to be trusted."""
    timeout_s: Seconds = 30
    client: dict[str, str | int | bool] = {}
    secrets: dict[str, str] = {}
    """librdkafka setting -> environment variable that holds it, e.g. {"sasl.password" = "KAFKA_PASSWORD"}."""

    def topic(self, name: str) -> str:
        """The name of contract topic `name` on this broker."""
        return self.topic_prefix + name

    @model_validator(mode="after")
    def _no_owned_keys(self) -> "Kafka":
        owned = {
            "bootstrap.servers",
            "group.id",
            "enable.idempotence",
            "acks",
            "auto.offset.reset",
            "enable.auto.commit",
        }
        taken = sorted(owned & set(self.client))
        if taken:
            raise ValueError(f"kafka.client sets {taken}, which Lagoon owns; remove them")
        secret = sorted(filter(is_secret, self.client))
        if secret:
            raise ValueError(
                f"kafka.client sets {secret}, which are secrets: name an environment variable for each in kafka.secrets"
            )
        return self


class Lake(Section):
    """The Delta lake. Without `uri` it lies in the run's folder."""

    uri: Uri = ""
    storage_options: StorageOptions = {}
    claims_uri: Uri = ""
    """Where bodies lie that are too large for a message; without it `_lagoon/claims` in the lake. Same options."""
    sink_partitions: int = Field(default=2, ge=1, le=64)


class Weights(Section):
    """The weight store. Without `uri` it lies in the run's folder."""

    uri: Uri = ""
    storage_options: StorageOptions = {}
    poll_s: Seconds = 0.25
    timeout_s: Seconds = 60
    """No readable manifest for this long: dispatch stops and health turns red."""
    full_every: int = Field(default=10, ge=1, le=100)
    """Versions from one full snapshot to the next; those in between are deltas where that saves bytes. 1: all full."""


class Tracking(Section):
    """MLflow. Without `uri` the local stack starts a server; `enabled = false` goes without."""

    uri: Uri = ""
    experiment: str = "lagoon"
    enabled: bool = True


class Family(Section):
    """Tasks of one kind; task i is built from (name, i, seed) by the environment."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    environment: str = "calculator"
    options: dict[str, Any] = {}
    num_tasks: Positive = 200
    weight: float = Field(default=1.0, ge=0)
    held_out_ratio: Ratio = 0.2

    @property
    def num_train(self) -> int:
        """Tasks [0, num_train) are trained on; the rest are held out."""
        return self.num_tasks - round(self.num_tasks * self.held_out_ratio)
