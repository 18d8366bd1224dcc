"""librdkafka's own mock broker, for real clients in unit tests: up at once, its topics have no configuration."""

from collections.abc import Generator
from contextlib import contextmanager

import confluent_kafka


@contextmanager
def mock_broker() -> Generator[str]:
    """The address of a broker that is gone at the end."""
    client = confluent_kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock", "log_level": 0})
    yield "{0.host}:{0.port}".format(*client.list_topics(timeout=30).brokers.values())
    del client  # the broker ends with the client that it is part of
