"""Fixtures for all tests: one real broker a session, and topics of its own for each test."""

import os
import subprocess
import time
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.stack import health
from infra.stack.kafka import LocalKafka
from infra.stack.ports import free_port
from schemas.settings import Kafka

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of an Apache Kafka broker that lives as long as the test session."""
    with running_broker(tmp_path_factory.mktemp("kafka")) as address:
        yield address


@contextmanager
def running_broker(folder: Path, environment: Mapping[str, str] = {}) -> Generator[str]:
    """Address of a broker whose data lie in `folder`; it is dead at the end. `environment` is added to this one."""
    local = LocalKafka(ROOT / ".lagoon" / "kafka", folder / "data", free_port(), free_port())
    with open(folder / "kafka.log", "wb") as log:
        process = subprocess.Popen(local.prepare(), stdout=log, stderr=log, env=os.environ | environment)
    try:
        _wait(process, local.address)
        yield local.address
    finally:
        process.kill()  # the data are thrown away, so nothing is lost by it
        process.wait(10)


@pytest.fixture
def kafka(broker: str) -> Kafka:
    """Settings for `broker` with a topic prefix of this test's own."""
    return Kafka(brokers=broker, topic_prefix=f"t{uuid.uuid4().hex[:8]}.", partitions=4)


def _wait(process: subprocess.Popen, address: str, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not (answer := health.kafka(Kafka(brokers=address))).ok:
        assert process.poll() is None, "the broker ended while it started"
        assert time.monotonic() < deadline, f"no broker after {timeout_s} s: {answer.reason}"
