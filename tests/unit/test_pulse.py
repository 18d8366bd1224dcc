"""What a flow's health says: waits are seen with their reason, and have a limit."""

import re

import pytest

from flows.connectors.pulse import PULSE, Patience, Pulse
from schemas.errors import BrokerError

PART = "00000/of-this-test"
"""A part of no flow that an earlier test may have left in this process's pulse."""


def test_a_flow_is_not_healthy_before_its_first_epoch() -> None:
    pulse = Pulse()
    assert pulse.fault(60, 60) == "no epoch has ended yet"
    pulse.beat("00000/usage")
    assert pulse.fault(60, 60) == ""


def test_a_flow_starts_until_it_stands_and_each_part_here_has_ended_an_epoch() -> None:
    pulse = Pulse()
    pulse.start()
    assert pulse.is_starting
    pulse.stand()
    assert not pulse.is_starting  # a process without parts of its own
    pulse.expect("00000/usage")
    pulse.expect("00000/evals")
    assert pulse.is_starting
    pulse.beat("00000/usage")
    assert pulse.is_starting
    pulse.end("00000/evals")
    assert not pulse.is_starting


def test_a_part_that_goes_silent_is_named_and_one_that_ended_is_not() -> None:
    pulse = Pulse()
    pulse.beat("00000/usage")
    pulse.beat("00000/evals")
    pulse.end("00000/evals")
    assert re.fullmatch(r"00000/usage: no epoch for \d+ s", pulse.fault(-1, 60))


def test_a_flow_that_hears_nothing_at_all_says_so() -> None:
    pulse = Pulse()
    assert pulse.silent_s() == 0
    pulse.beat("00000/usage")
    assert "is dispatch up?" in pulse.fault(60, -1)
    assert pulse.silent_s() >= 0


def test_a_trouble_shows_until_the_broker_answers() -> None:
    patience = Patience(PART, 60)
    patience.trouble("connection refused")
    assert f"{PART}: waiting for the broker: connection refused" in PULSE.fault(60, 60)
    patience.ok()
    assert PART not in PULSE.fault(60, 60)


def test_patience_ends_with_the_reason_and_the_setting() -> None:
    patience = Patience(PART, -1)
    with pytest.raises(BrokerError, match=r"kafka\.timeout_s.*connection refused"):
        patience.trouble("connection refused")
    patience.ok()
