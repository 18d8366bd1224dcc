"""Sections: cost, telemetry, the local stack, maintenance."""

from typing import Literal

from pydantic import Field

from schemas.settings.base import Seconds, Section


class Cost(Section):
    """Prices, for cost per effective sample."""

    accelerator_hour: float = Field(default=2.0, ge=0)
    """Price of one accelerator for one hour, in `currency`."""
    currency: str = "USD"


class Telemetry(Section):
    """Logs, metrics, health. Port 0 takes a free one and writes it to the run's `services` folder."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    usage_s: Seconds = 2


class Stack(Section):
    """Servers that `lagoon up` starts on this machine where no address is set. Port 0 takes a free one."""

    kafka_port: int = Field(default=0, ge=0, le=65535)
    mlflow_port: int = Field(default=0, ge=0, le=65535)
    start_timeout_s: Seconds = 180
    hung_timeout_s: Seconds = 60
    """A process of the run that leaves `/healthz` unanswered for so long is killed, and started again."""
    min_free_bytes: int = Field(default=2 * 1024**3, ge=0)


class Maintenance(Section):
    """Upkeep of the lake and the weight store beside the running loop."""

    enabled: bool = True
    every_s: Seconds = 300
    min_files: int = Field(default=32, ge=2)
    """Small files that a partition may have while it is written to; with more they are merged."""
    target_bytes: int = Field(default=128 * 1024 * 1024, ge=1024 * 1024)
    """Size of merged files."""
    vacuum_every_s: Seconds = 3600
    vacuum_retention_h: int = Field(default=168, ge=24)
    """Files that were rewritten, or never committed, stay this long; a flow that stood still may yet commit them."""
    log_retention_h: int = Field(default=24, ge=1)
    """Commits stay in a table's log at least this long, and until every checkpoint of the learner is past them.

    On a local folder a commit lists the whole log, so a long one makes it slow.
    """
    keep_weight_versions: int = Field(default=20, ge=2)
    """Newest versions that stay, beside those that a checkpoint, a best eval or an open service names."""
