"""Directives from the `control` topic, as far as the learner obeys them."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

from infra.telemetry import logger
from schemas.errors import BrokerError
from schemas.messages import Directive

_FIELDS = {
    "pause": "paused",
    "learning_rate_scale": "learning_rate_scale",
    "bucket_weights": "bucket_weights",
    "min_weight_version": "min_weight_version",
}


@dataclass(frozen=True, slots=True)
class Orders:
    """What is in force. `directive_id` names the last directive that set any of it."""

    paused: bool = False
    learning_rate_scale: float = 1.0
    bucket_weights: tuple[float, ...] | None = None
    min_weight_version: int = 0
    directive_id: str | None = None


def obey(orders: Orders, directive: Directive) -> Orders:
    """`orders` after `directive`: fields that it leaves out stay, directives for others change nothing."""
    if directive.target not in {"all", "learner"}:
        return orders
    changes: dict[str, Any] = {
        mine: value for theirs, mine in _FIELDS.items() if (value := getattr(directive, theirs)) is not None
    }
    return replace(orders, **changes, directive_id=directive.directive_id) if changes else orders


class Source(Protocol):
    """The one method of `infra.kafka.Follower` that directives need."""

    def poll(self) -> list[Directive]: ...


class Directives:
    """Keeps the orders in force. While Kafka is away they stand as they are: training does not need it."""

    def __init__(self, source: Source):
        self._source = source
        self._failure = ""
        self.orders = Orders()

    def poll(self) -> Orders:
        """The orders in force now."""
        try:
            for directive in self._source.poll():
                self.orders = obey(self.orders, directive)
            self._failure = ""
        except BrokerError as error:
            if str(error) != self._failure:
                logger("learner").warning("directives are out of reach, orders stand", error=str(error))
            self._failure = str(error)
        return self.orders
