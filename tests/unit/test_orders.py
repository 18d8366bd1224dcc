"""What the control topic tells a rollout service."""

from inference.orders import Orders
from schemas.errors import BrokerError
from schemas.messages import Directive
from tests.rollout_fakes import NOW


class Control:
    """A control topic: each poll gives the next list, or raises the next error."""

    def __init__(self, *answers: list[Directive] | BrokerError) -> None:
        self._answers = list(answers)

    def poll(self) -> list[Directive]:
        answer = self._answers.pop(0) if self._answers else []
        if isinstance(answer, BrokerError):
            raise answer
        return answer

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
    orders = Orders(lambda: control)
    orders.poll()
    assert (orders.pause, orders.directive_id) == (True, "d1")
    orders.poll()
    assert (orders.pause, orders.min_weight_version) == (True, 7)
    orders.poll()
    assert (orders.pause, orders.min_weight_version, orders.directive_id) == (False, 7, "d3")


def test_directives_to_others_change_nothing() -> None:
    orders = Orders(lambda: Control([_directive(1, "dispatch", pause=True), _directive(2, "clock", pause=True)]))
    orders.poll()
    assert (orders.pause, orders.directive_id) == (False, "")


def test_orders_stand_while_kafka_is_away_and_are_read_anew_afterwards() -> None:
    lives = [
        Control([_directive(1, "rollout", pause=True)], BrokerError("no answer")),
        Control([_directive(1, "rollout", pause=True), _directive(2, "rollout", pause=False)]),
    ]
    orders = Orders(lambda: lives.pop(0))
    orders.poll()
    orders.poll()
    assert orders.pause
    orders.poll()
    assert not orders.pause


def test_a_broker_that_cannot_be_reached_at_the_start_is_tried_again() -> None:
    answers: list[object] = [BrokerError("no answer"), Control([_directive(1, "all", pause=True)])]

    def connect() -> Control:
        answer = answers.pop(0)
        if isinstance(answer, BrokerError):
            raise answer
        assert isinstance(answer, Control)
        return answer

    orders = Orders(connect)
    orders.poll()
    assert not orders.pause
    orders.poll()
    assert orders.pause
