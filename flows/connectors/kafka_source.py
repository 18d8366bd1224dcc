"""Kafka sources. `MergeSource`: one deterministic order over several topics. `TopicsSource`: each partition by itself."""

from collections.abc import Sequence
from typing import Any

from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from infra.telemetry import Stop

from flows.connectors.items import Clock, Hole, Raw, Tick
from schemas.settings import Kafka


class MergeSource(FixedPartitionedSource[Raw | Hole | Tick, dict[str, Any]]):
    """Partition p of `data_topic`, merged with the single-partition `side_topics` by broker timestamp.

    The order is a function of the logs alone: timestamp, then `data_topic` before `side_topics` as listed, then offset.
    Side messages come once per partition of `data_topic`: each partition is followed by its own copy.
    """

    def __init__(
        self,
        kafka: Kafka,
        data_topic: str,
        side_topics: Sequence[str],
        *,
        epoch_bytes: int,
        skip_expired: bool,
        client_id: str,
        stop_at_end: bool = False,
        stop: Stop | None = None,
    ) -> None:
        raise NotImplementedError

    def list_parts(self) -> list[str]:
        raise NotImplementedError

    def build_part(
        self, step_id: str, for_part: str, resume_state: dict[str, Any] | None
    ) -> StatefulSourcePartition[Raw | Hole | Tick, dict[str, Any]]:
        raise NotImplementedError


class TopicsSource(FixedPartitionedSource[Raw | Hole | Tick | Clock, dict[str, Any]]):
    """Every partition of `topics`, each in its own order; with `tick_s` also a `Clock` item every that many seconds."""

    def __init__(
        self,
        kafka: Kafka,
        topics: Sequence[str],
        *,
        epoch_bytes: int,
        skip_expired: bool,
        client_id: str,
        tick_s: float | None = None,
        stop_at_end: bool = False,
        stop: Stop | None = None,
    ) -> None:
        raise NotImplementedError

    def list_parts(self) -> list[str]:
        raise NotImplementedError

    def build_part(
        self, step_id: str, for_part: str, resume_state: dict[str, Any] | None
    ) -> StatefulSourcePartition[Raw | Hole | Tick | Clock, dict[str, Any]]:
        raise NotImplementedError
