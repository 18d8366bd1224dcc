"""Sending a directive on the `control` topic."""

from datetime import UTC, datetime
from typing import Any

from infra.kafka import Producer
from schemas.ids import trajectory_id
from schemas.messages import Directive
from schemas.settings import Kafka
from schemas.topics import CONTROL


def send_directive(kafka: Kafka, *, target: str, issued_by: str, reason: str, **orders: Any) -> Directive:
    """Send one directive and return it once the broker has it.

    Raises:
        BrokerError: it was not delivered within `kafka.timeout_s`.
    """
    directive = Directive.model_validate(
        {
            "directive_id": trajectory_id(),
            "target": target,
            "issued_by": issued_by,
            "issued_at": datetime.now(UTC),
            "reason": reason,
            **orders,
        }
    )
    producer = Producer(kafka, f"lagoon-{issued_by}")
    try:
        producer.send(CONTROL.name, directive.target, directive.to_bytes())
        producer.flush(kafka.timeout_s)
    finally:
        producer.close()
    return directive
