"""What the control topic tells a rollout service: to pause, and which weight version to wait for."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Protocol

from infra.control import directives, refused
from schemas.errors import BrokerError
from schemas.messages import Directive
from schemas.settings import Kafka


class Directives(Protocol):
    """A source of directives: `infra.kafka.Follower`."""

    def poll(self) -> Iterable[Directive]: ...
    def close(self) -> None: ...


class Orders:
    """The latest word on each setting, from directives to `rollout` and `all`.

    Attributes:
        min_weight_version: Episodes wait for this version.
        directive_id: The directive that changed something last.
    """

    def __init__(
        self, connect: Callable[[], Directives], now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """`connect` may fail while Kafka is away; it is tried again at the next `poll`."""
        self.min_weight_version, self.directive_id = 0, ""
        self._pause: Directive | None = None
        self._connect, self._now = connect, now
        self._source: Directives | None = None

    @classmethod
    def of(cls, kafka: Kafka, client_id: str) -> "Orders":
        """The orders on the control topic of `kafka`."""
        return cls(lambda: directives(kafka, client_id))

    @property
    def pause(self) -> bool:
        """Start no episodes now."""
        return self._pause is not None and self._pause.pauses(self._now())

    def poll(self, newest_version: int = 0, max_staleness: int = 0) -> None:
        """Take in what is new. Without an answer from Kafka the orders so far stand, and later ones are read later.

        A directive that demands a version far beyond `newest_version` is refused.
        """
        with suppress(BrokerError):
            self._source = self._source or self._connect()
            for directive in self._source.poll():
                if directive.target in ("rollout", "all") and not refused(
                    directive, directive.refusal(newest_version, max_staleness, self._now())
                ):
                    self._obey(directive)

    def close(self) -> None:
        """Let go of the topic."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _obey(self, directive: Directive) -> None:
        if directive.pause is not None:
            self._pause, self.directive_id = directive, directive.directive_id
        if directive.min_weight_version is not None:
            self.min_weight_version, self.directive_id = directive.min_weight_version, directive.directive_id
