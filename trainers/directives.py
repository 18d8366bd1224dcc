"""Directives from the `control` topic, as far as the learner obeys them."""

from dataclasses import dataclass, replace
from typing import Any

from infra.kafka import Follower
from schemas.messages import Directive
from schemas.settings import Kafka
from schemas.topics import CONTROL

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


class Directives:
    """Follows `control`, from the beginning, so that a restarted learner obeys what was ordered before."""

    def __init__(self, kafka: Kafka, client_id: str):
        self._follower = Follower(kafka, CONTROL.name, Directive, client_id)
        self.orders = Orders()

    def poll(self) -> Orders:
        """The orders in force now."""
        for directive in self._follower.poll():
            self.orders = obey(self.orders, directive)
        return self.orders

    def close(self) -> None:
        """Leave the broker."""
        self._follower.close()
