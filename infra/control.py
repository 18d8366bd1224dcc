"""Directives on the `control` topic: sending one, hearing them, and what becomes of one that is not obeyed."""

import logging
from datetime import UTC, datetime
from typing import Any

from prometheus_client import Counter

from infra.kafka import Follower, Producer
from schemas.ids import trajectory_id
from schemas.messages import Directive
from schemas.settings import Kafka
from schemas.topics import CONTROL

log = logging.getLogger("lagoon.control")

REFUSED = Counter("lagoon_refused_directives", "Directives that whoever they are for does not obey", ["target"])


def directives(kafka: Kafka, client_id: str) -> Follower[Directive]:
    """All directives on the topic and those to come, but for `clock`: that is no order, and two a second for a week."""
    return Follower(kafka, CONTROL.name, Directive, client_id, without="clock")


def refused(directive: Directive, reason: str | None) -> bool:
    """Whether there is a `reason` not to obey; if so it is counted and logged."""
    if reason is not None:
        REFUSED.labels(directive.target).inc()
        log.warning("directive %s from %s refused: %s", directive.directive_id, directive.issued_by, reason)
    return reason is not None


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
