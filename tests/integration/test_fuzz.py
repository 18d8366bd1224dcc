"""Hostile messages through the real flow; `make fuzz` sends many more."""

import subprocess
import sys
from pathlib import Path

import pytest

from infra.stack.programs import ROOT
from schemas.settings import Kafka
from tests.fuzz import consumers
from tests.fuzz.classes import CLASSES
from tests.fuzz.messages import fuzz


@pytest.mark.kafka
def test_every_hostile_message_becomes_a_row_in_bounded_memory(kafka: Kafka, tmp_path: Path) -> None:
    result = fuzz(kafka, tmp_path, 20 * len(CLASSES), seed=7)
    assert result.faults() == []


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_hostile_json_message_is_recorded_or_counted_and_no_process_dies(kafka: Kafka, tmp_path: Path) -> None:
    assert consumers.through(kafka, tmp_path, 50 * len(consumers.CLASSES), seed=7).problems() == []


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="atheris comes for Linux only")
def test_no_input_that_coverage_leads_to_breaks_the_decoder() -> None:
    command = [sys.executable, "-m", "tests.fuzz.decoder", "--runs", "5000"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert told.returncode == 0, told.stdout[-3000:]
    assert "number_of_executed_units: 5000" in told.stdout  # what it counted, not what it says
