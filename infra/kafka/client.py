"""Settings of a Kafka client, and what its errors become."""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from schemas.errors import BrokerError, SettingsError
from schemas.settings import Kafka

C = TypeVar("C")

log = logging.getLogger("lagoon.kafka")

_QUIET_S = 30
_REFUSED_S = 2 * _QUIET_S  # librdkafka repeats itself after 30 s

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
_FORBIDDEN = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
UNKNOWN_TOPIC = frozenset({KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART})


def client_settings(kafka: Kafka, client_id: str) -> dict[str, Any]:
    """Librdkafka settings that every client shares: address, name, `kafka.client`, secrets from the environment.

    Raises:
        SettingsError: no address is set, or an environment variable named in `kafka.secrets` is missing.
    """
    if not kafka.brokers:
        raise SettingsError("kafka.brokers is empty; run `lagoon up` for a local broker, or set its address")
    defaults = {"reconnect.backoff.max.ms": 2000, "socket.keepalive.enable": True}
    callbacks = {"logger": log, "error_cb": partial(_note, kafka)}
    owned = {"bootstrap.servers": kafka.brokers, "client.id": client_id, **callbacks}
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


def administrator(kafka: Kafka, client_id: str) -> AdminClient:
    """A client for administration; use it as a context manager.

    A failed answer that is raised ties the client into a cycle (answer, exception, traceback, frame). librdkafka aborts
    the process if the client's own thread happens to collect it
    (https://github.com/confluentinc/confluent-kafka-python/pull/2131); one that was closed has no thread any more.

    Raises:
        SettingsError: librdkafka refuses a setting.
    """
    return create(AdminClient, kafka, client_settings(kafka, client_id))


class Client(Protocol):
    """Any librdkafka client: what it has to say comes out of `poll`."""

    def poll(self, timeout: float, /) -> Any:
        """Serve callbacks."""
        ...


def broker_error(
    kafka: Kafka, action: str, error: KafkaError | KafkaException, client: Client | None = None
) -> BrokerError:
    """What went wrong in `action`, where, and what to do. Give the `client` where its callbacks wait to be served."""
    fault = error.args[0] if isinstance(error, KafkaException) else error
    if client is not None:
        client.poll(0)
    if fault.code() in _UNREACHABLE:
        return unanswered(kafka, action, fault.str())
    mend = ""
    if fault.code() in UNKNOWN_TOPIC:
        mend = "; `lagoon up` creates the topics, `lagoon doctor` compares them"
    if fault.code() in _FORBIDDEN:
        mend = "; this client's principal lacks a right: docs/security.md lists what each role needs"
    return BrokerError(f"{action}: Kafka at {kafka.brokers} answers {fault.name()}: {fault.str()}{mend}")


def unanswered(kafka: Kafka, action: str, detail: str) -> BrokerError:
    """No answer to `action`: the broker is away, or it did not let this client in."""
    at, refusal = _refusals.get(kafka.model_dump_json(), (0.0, None))
    if refusal is not None and time.monotonic() - at < _REFUSED_S:
        mend = _mend(kafka, refusal)
        return BrokerError(f"{action}: Kafka at {kafka.brokers} and this client do not agree ({refusal.str()}); {mend}")
    protocol = kafka.client.get("security.protocol", "not set: plaintext")
    return BrokerError(
        f"{action}: no answer from Kafka at {kafka.brokers} ({detail}); start it with `lagoon up`, or correct "
        f"kafka.brokers, or security.protocol in kafka.client ({protocol})"
    )


_refusals: dict[str, tuple[float, KafkaError]] = {}
"""The settings of a client -> when and why it was not let in last; librdkafka itself only says that nobody answers."""


def _note(kafka: Kafka, error: KafkaError) -> None:
    if error.code() in {KafkaError._AUTHENTICATION, KafkaError._SSL}:
        _refusals[kafka.model_dump_json()] = time.monotonic(), error


def _mend(kafka: Kafka, refusal: KafkaError) -> str:
    if refusal.code() == KafkaError._AUTHENTICATION:
        mechanism, name = kafka.client.get("sasl.mechanism", "not set"), kafka.client.get("sasl.username", "not set")
        variable = kafka.secrets.get("sasl.password")
        password = f"the password in ${variable}" if variable else "sasl.password in kafka.secrets, which is not set"
        return f"sasl.mechanism is {mechanism}, sasl.username is {name}: check these in kafka.client, and {password}"
    authority = kafka.client.get("ssl.ca.location", "not set: the system's authorities")
    return (
        f"check kafka.client: ssl.ca.location ({authority}) has to name the authority that signed the broker's "
        "certificate, and the certificate the host in kafka.brokers"
    )


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
