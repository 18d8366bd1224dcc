"""What the control topic tells a rollout service."""

from collections.abc import Iterator
from datetime import timedelta

from inference.orders import Orders
from schemas.errors import BrokerError
from schemas.messages import Directive
from tests.rollout_fakes import NOW


class Control:
    """A control topic: each poll gives the next list, up to an error in it."""

    def __init__(self, *answers: list[Directive | BrokerError]) -> None:
        self._answers = list(answers)

    def poll(self) -> Iterator[Directive]:
        for heard in self._answers.pop(0) if self._answers else []:
            if isinstance(heard, BrokerError):
                raise heard
            yield heard

    def close(self) -> None:
        """Nothing to leave."""


def _directive(number: int, target: str, **orders: object) -> Directive:
    fields = {"directive_id": f"d{number}", "target": target, "issued_by": "test", "issued_at": NOW}
    return Directive.model_validate(fields | orders)


def test_a_pause_holds_until_it_is_lifted_and_names_its_directive() -> None:
    control = Control(
        [_directive(1, "rollout", pause=True)],
        [_directive(2, "all", min_weight_version=7)],
        [_directive(3, "all", pause=False)],
    )
    orders = Orders(lambda: control, lambda: NOW)
    orders.poll()
    assert (orders.pause, orders.directive_id) == (True, "d1")
    orders.poll()
    assert (orders.pause, orders.min_weight_version) == (True, 7)
    orders.poll()
    assert (orders.pause, orders.min_weight_version, orders.directive_id) == (False, 7, "d3")


def test_directives_to_others_change_nothing() -> None:
    orders = Orders(
        lambda: Control([_directive(1, "dispatch", pause=True), _directive(2, "clock", pause=True)]), lambda: NOW
    )
    orders.poll()
    assert (orders.pause, orders.directive_id) == (False, "")


def test_orders_heard_before_kafka_went_away_stand_and_are_read_on_from_there() -> None:
    answers = [_directive(1, "rollout", pause=True), BrokerError("no answer")], [_directive(2, "rollout", pause=False)]
    lives = [Control(*answers)]
    orders = Orders(lives.pop, lambda: NOW)
    orders.poll()
    assert (orders.pause, orders.directive_id) == (True, "d1")
    orders.poll()
    assert (orders.pause, orders.directive_id) == (False, "d2")


def test_a_broker_that_cannot_be_reached_at_the_start_is_tried_again() -> None:
    answers: list[object] = [BrokerError("no answer"), Control([_directive(1, "all", pause=True)])]

    def connect() -> Control:
        answer = answers.pop(0)
        if isinstance(answer, BrokerError):
            raise answer
        assert isinstance(answer, Control)
        return answer

    orders = Orders(connect, lambda: NOW)
    orders.poll()
    assert not orders.pause
    orders.poll()
    assert orders.pause


def test_a_pause_that_nobody_lifts_ends_after_a_day() -> None:
    now = [NOW]
    orders = Orders(lambda: Control([_directive(1, "rollout", pause=True)]), lambda: now[0])
    orders.poll()
    now[0] = NOW + timedelta(days=1, seconds=-1)
    assert orders.pause
    now[0] = NOW + timedelta(days=1)
    assert not orders.pause


def test_a_version_that_nobody_published_and_an_order_from_the_future_are_refused() -> None:
    """The newest version known is 7, the bound 3: news of 8 to 11 may be on their way, 12 cannot be."""
    told = [
        _directive(1, "rollout", min_weight_version=11),
        _directive(2, "rollout", min_weight_version=12),
        _directive(3, "rollout", pause=True, issued_at=NOW + timedelta(minutes=6)),
    ]
    orders = Orders(lambda: Control(told), lambda: NOW)
    orders.poll(newest_version=7, max_staleness=3)
    assert (orders.pause, orders.min_weight_version, orders.directive_id) == (False, 11, "d1")
