"""Settings of a Kafka client, and what its errors become."""

import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from schemas.errors import BrokerError, SettingsError
from schemas.settings import Kafka

C = TypeVar("C")

log = logging.getLogger("lagoon.kafka")

_QUIET_S = 30

_UNREACHABLE = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError._PURGE_QUEUE,
        KafkaError._PURGE_INFLIGHT,
        KafkaError.REQUEST_TIMED_OUT,
    }
)
_UNKNOWN_TOPIC = frozenset({KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART})


def client_settings(kafka: Kafka, client_id: str) -> dict[str, Any]:
    """Librdkafka settings that every client shares: address, name, `kafka.client`, secrets from the environment.

    Raises:
        SettingsError: no address is set, or an environment variable named in `kafka.secrets` is missing.
    """
    if not kafka.brokers:
        raise SettingsError("kafka.brokers is empty; run `lagoon up` for a local broker, or set its address")
    defaults = {"reconnect.backoff.max.ms": 2000, "socket.keepalive.enable": True, "logger": log}
    owned = {"bootstrap.servers": kafka.brokers, "client.id": client_id}
    return defaults | kafka.client | _secrets(kafka) | owned


def consumer(kafka: Kafka, client_id: str, **settings: Any) -> confluent_kafka.Consumer:
    """A consumer that commits nothing by itself, reads committed messages only, and stops where offsets are gone.

    The caller assigns partitions. `settings` are librdkafka's and win over these (`**{"group.id": "dispatch"}`).

    Raises:
        SettingsError: librdkafka refuses a setting.
    """
    own = {
        "group.id": kafka.topic(client_id),
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "fetch.queue.backoff.ms": 20,  # the default of 1 s stalls a reader that has just emptied a full queue
    }
    return create(confluent_kafka.Consumer, kafka, own | client_settings(kafka, client_id) | settings)


def create(factory: Callable[[dict[str, Any]], C], kafka: Kafka, settings: dict[str, Any]) -> C:
    """`factory(settings)`; what librdkafka refuses becomes a SettingsError that shows no secret."""
    try:
        return factory(settings)
    except (KafkaException, TypeError, ValueError) as error:
        text = str(error)
        for secret in _secrets(kafka).values():
            text = text.replace(secret, "***")
    raise SettingsError(f"librdkafka refuses the settings in kafka.client or kafka.secrets: {text}")


def broker_error(kafka: Kafka, action: str, error: KafkaError | KafkaException) -> BrokerError:
    """What went wrong in `action`, where, and what to do."""
    fault = error.args[0] if isinstance(error, KafkaException) else error
    if fault.code() in _UNREACHABLE:
        return BrokerError(
            f"{action}: no answer from Kafka at {kafka.brokers} ({fault.str()}); "
            "start it with `lagoon up`, or correct kafka.brokers"
        )
    mend = "; `lagoon up` creates the topics, `lagoon doctor` compares them" if fault.code() in _UNKNOWN_TOPIC else ""
    return BrokerError(f"{action}: Kafka at {kafka.brokers} answers {fault.name()}: {fault.str()}{mend}")


class _Once(logging.Filter):
    """Lets a text pass once in `_QUIET_S`: librdkafka says the same at every attempt to connect."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a repeat."""
        text, now = record.getMessage(), record.created
        if now - self._said.get(text, -_QUIET_S) < _QUIET_S:
            return False
        self._said = {t: at for t, at in self._said.items() if now - at < _QUIET_S} | {text: now}
        return True


log.addFilter(_Once())


def _secrets(kafka: Kafka) -> dict[str, str]:
    missing = sorted(variable for variable in kafka.secrets.values() if variable not in os.environ)
    if missing:
        raise SettingsError(f"kafka.secrets names environment variables that are not set: {', '.join(missing)}")
    return {key: os.environ[variable] for key, variable in kafka.secrets.items()}
