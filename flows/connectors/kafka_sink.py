"""Messages to a topic, at least once: delivered before the epoch that made them becomes durable."""

from bytewax.outputs import FixedPartitionedSink, StatefulSinkPartition

from schemas.messages import Message
from schemas.settings import Kafka


class KafkaSink(FixedPartitionedSink[Message | bytes, None]):
    """Items (key, Message | bytes) to `topic`, which is a contract name."""

    def __init__(self, kafka: Kafka, topic: str, client_id: str) -> None:
        raise NotImplementedError

    def list_parts(self) -> list[str]:
        raise NotImplementedError

    def build_part(
        self, step_id: str, for_part: str, resume_state: None
    ) -> StatefulSinkPartition[Message | bytes, None]:
        raise NotImplementedError
