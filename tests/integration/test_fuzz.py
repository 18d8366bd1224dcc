"""Hostile messages through the real flow; `make fuzz` sends many more."""

from pathlib import Path

import pytest

from schemas.settings import Kafka
from tests.fuzz.classes import CLASSES
from tests.fuzz.messages import fuzz


@pytest.mark.kafka
def test_every_hostile_message_becomes_a_row_in_bounded_memory(kafka: Kafka, tmp_path: Path) -> None:
    result = fuzz(kafka, tmp_path, 20 * len(CLASSES), seed=7)
    assert result.faults() == []
