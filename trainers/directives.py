"""Directives from the `control` topic, as far as the learner obeys them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from infra.control import refused
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

    def poll(self) -> Iterable[Directive]: ...


class Directives:
    """Keeps the orders in force. While Kafka is away they stand as they are: training does not need it."""

    def __init__(self, source: Source, now: Callable[[], datetime] = lambda: datetime.now(UTC)):
        self._source, self._now = source, now
        self._failure = ""
        self._pause: Directive | None = None
        self.orders = Orders()

    def poll(self, weight_version: int = 0, max_staleness: int = 0) -> Orders:
        """The orders in force now; one that demands a version far beyond `weight_version` is refused."""
        try:
            for directive in self._source.poll():
                if not refused(directive, directive.refusal(weight_version, max_staleness, self._now())):
                    self._pause = directive if directive.pause else self._pause
                    self.orders = obey(self.orders, directive)
            self._failure = ""
        except BrokerError as error:
            if str(error) != self._failure:
                logger("learner").warning("directives are out of reach, orders stand", error=str(error))
            self._failure = str(error)
        if self.orders.paused and self._pause and not self._pause.pauses(self._now()):
            self.orders = replace(self.orders, paused=False)
        return self.orders
