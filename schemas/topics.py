"""Kafka topics: key, partitions, retention, cleanup. Created explicitly; auto-create is off."""

from dataclasses import dataclass

from schemas.settings import Kafka

HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic's contract. `key` and `value` say what the bytes mean; `config` holds broker settings."""

    name: str
    key: str
    value: str
    partitioned: bool
    cleanup: str

    def config(self, kafka: Kafka) -> dict[str, str]:
        """Broker settings of this topic. Log-append time makes the merge of topics a function of the log.

        A broker that keeps batches as they come limits what they take compressed only, and readers would unfold them.
        """
        retention_ms = str(kafka.retention_h * HOUR_MS)
        settings = {
            "cleanup.policy": self.cleanup,
            "retention.ms": retention_ms,
            "message.timestamp.type": "LogAppendTime",
            "max.message.bytes": str(kafka.max_message_bytes),
            "compression.type": kafka.compression,
        }
        if "compact" in self.cleanup:  # replay needs every message for as long as trajectories are kept
            settings["min.compaction.lag.ms"] = retention_ms
        return settings


TASKS = Topic("tasks", "group_id", "JSON schemas.messages.Task", False, "delete")  # a share group has no skew on one
BUFFER = Topic(
    "buffer", "shard, `fork-` and shard, or `learner`", "JSON BufferReport, Fork or LearnerReport", False, "compact"
)
TRAJECTORIES = Topic(
    "trajectories", "group_id", "Arrow IPC stream of 1 to 16 rows, or JSON schemas.claims.Claim", True, "delete"
)
WEIGHTS = Topic("weights", "version", "JSON WeightSummary", False, "compact")
EVALS = Topic("evals", "weight version and `light` or `full`", "JSON EvalResult", False, "compact,delete")
CONTROL = Topic("control", "target", "JSON Directive", False, "compact")
USAGE = Topic("usage", "service instance", "JSON UsageInterval", False, "delete")

TOPICS = {t.name: t for t in (TASKS, BUFFER, TRAJECTORIES, WEIGHTS, EVALS, CONTROL, USAGE)}
