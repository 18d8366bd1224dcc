"""What the learner obeys, and what its watchdog says."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from schemas.errors import BrokerError
from schemas.messages import Directive
from trainers.directives import Directives, Orders, obey
from trainers.watchdog import Watchdog, explain

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def directive(name: str, target: str = "learner", **fields: object) -> Directive:
    body = {"directive_id": name, "target": target, "issued_by": "evaluator", "issued_at": NOW} | fields
    return Directive.model_validate(body)


def test_a_field_that_a_directive_leaves_out_stays_as_it_was() -> None:
    orders = obey(Orders(), directive("a", learning_rate_scale=0.5, bucket_weights=(4.0, 1.0)))
    orders = obey(orders, directive("b", pause=True))
    assert orders == Orders(True, 0.5, (4.0, 1.0), 0, "b")
    assert not obey(orders, directive("c", pause=False)).paused


def test_directives_for_others_and_the_clock_change_nothing() -> None:
    orders = obey(Orders(), directive("a", learning_rate_scale=0.5))
    assert obey(orders, directive("b", "dispatch", learning_rate_scale=0.1)) == orders
    assert obey(orders, directive("c", "clock")) == orders
    assert obey(orders, directive("d", "learner", family_weights={"add": 1.0})) == orders
    assert obey(orders, directive("e", "all", min_weight_version=3)).min_weight_version == 3


def test_orders_stand_while_kafka_is_away() -> None:
    class Control:
        answers = iter([directive("a", pause=True)])

        def poll(self) -> Iterator[Directive]:
            yield from self.answers
            raise BrokerError("away")

    directives = Directives(Control(), lambda: NOW)
    assert [directives.poll().directive_id for _ in range(3)] == ["a", "a", "a"]


def test_the_watchdog_speaks_at_its_limit_and_again_each_further_limit() -> None:
    watchdog = Watchdog(30, fed_at=100)
    assert [watchdog.is_due(now) for now in (129, 130, 131, 159, 160, 161)] == [False, True, False, False, True, False]
    watchdog.feed(200)
    assert [watchdog.is_due(now) for now in (229, 230)] == [False, True]


def test_the_reason_names_the_buffer_and_the_age_of_the_last_row() -> None:
    empty = explain(30, 0, 128, NOW - timedelta(seconds=95), NOW)
    assert "buffer empty (0 of 128 trajectories)" in empty
    assert "admitted 95 s ago" in empty
    short = explain(30, 7, 128, None, NOW)
    assert "buffer short (7 of 128 trajectories)" in short
    assert "no row was ever admitted" in short


class Told:
    """A control topic that holds these directives."""

    def __init__(self, *directives: Directive) -> None:
        self._left = list(directives)

    def poll(self) -> list[Directive]:
        left, self._left = self._left, []
        return left


def test_a_pause_that_nobody_lifts_ends_after_a_day() -> None:
    now = [NOW]
    directives = Directives(Told(directive("a", pause=True, learning_rate_scale=0.5)), lambda: now[0])
    assert directives.poll().paused
    now[0] = NOW + timedelta(days=1)
    assert directives.poll() == Orders(paused=False, learning_rate_scale=0.5, directive_id="a")


def test_a_version_that_nobody_published_and_an_order_from_the_future_are_refused() -> None:
    """The learner is at version 7, the bound 3: 11 is believed, 12 is not."""
    future = directive("c", pause=True, issued_at=NOW + timedelta(minutes=6))
    told = Told(directive("a", min_weight_version=11), directive("b", min_weight_version=12), future)
    assert Directives(told, lambda: NOW).poll(7, 3) == Orders(min_weight_version=11, directive_id="a")
