"""Topics as `schemas.topics` declares them: created where missing, never silently other than declared."""

import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType, TopicMetadata

from infra.kafka.client import administrator, broker_error
from schemas.errors import BrokerError
from schemas.settings import Kafka
from schemas.topics import TOPICS, Topic


def ensure_topics(kafka: Kafka, timeout_s: float = 30) -> None:
    """Create the topics that are missing; existing ones stay as they are.

    Raises:
        BrokerError: the broker is away or refuses, or a topic is not as declared; names each difference and its mend.
    """
    deadline = time.monotonic() + timeout_s
    with administrator(kafka, "lagoon-admin") as admin:
        missing = _missing(kafka, _metadata(kafka, admin, timeout_s))
        if missing:
            _create(kafka, admin, missing, timeout_s)
            _wait_for_leaders(kafka, admin, deadline)
        differences = _differences(kafka, admin, timeout_s)
    if differences:
        raise BrokerError("topics are not as declared:\n" + "\n".join(f"- {d}" for d in differences))


def topic_differences(kafka: Kafka) -> list[str]:
    """What differs between the broker's topics and the declared ones, each with its mend; empty if all is well.

    Raises:
        BrokerError: the broker is away, or refuses to tell.
    """
    with administrator(kafka, "lagoon-admin") as admin:
        return _differences(kafka, admin, kafka.timeout_s)


def cluster_id(kafka: Kafka) -> str:
    """The id of the cluster, which a broker whose data were lost does not have again.

    Raises:
        BrokerError: the broker is away or refuses.
    """
    with administrator(kafka, "lagoon-admin") as admin:
        try:
            return str(admin.list_topics(timeout=kafka.timeout_s).cluster_id)
        except KafkaException as error:
            raise broker_error(kafka, "asking for the cluster's id", error, admin) from error


def partitions_of(kafka: Kafka, topic: Topic) -> int:
    """The partition count that `topic` is declared with."""
    return kafka.partitions if topic.partitioned else 1


def _metadata(kafka: Kafka, admin: AdminClient, timeout_s: float) -> Mapping[str, TopicMetadata]:
    try:
        return admin.list_topics(timeout=timeout_s).topics
    except KafkaException as error:
        raise broker_error(kafka, "listing topics", error, admin) from error


def _missing(kafka: Kafka, topics: Mapping[str, TopicMetadata]) -> list[Topic]:
    return [t for t in TOPICS.values() if kafka.topic(t.name) not in topics]


def _create(kafka: Kafka, admin: AdminClient, missing: list[Topic], timeout_s: float) -> None:
    new = [
        NewTopic(kafka.topic(t.name), partitions_of(kafka, t), kafka.replication, config=t.config(kafka))
        for t in missing
    ]
    for name, future in admin.create_topics(new, operation_timeout=timeout_s, request_timeout=timeout_s).items():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another process was faster
                action = f"creating topic {name} with kafka.replication = {kafka.replication}"
                raise broker_error(kafka, action, error) from error


def _wait_for_leaders(kafka: Kafka, admin: AdminClient, deadline: float) -> None:
    while True:
        topics = _metadata(kafka, admin, max(0.1, deadline - time.monotonic()))
        waiting = [n for n in map(kafka.topic, TOPICS) if n not in topics or not _has_leaders(topics[n])]
        if not waiting:
            return
        if time.monotonic() >= deadline:
            raise BrokerError(f"topics {waiting} were created but have no leader yet; look at the broker's log")
        time.sleep(0.05)


def _has_leaders(topic: TopicMetadata) -> bool:
    return topic.error is None and all(p.leader >= 0 for p in topic.partitions.values())


def _differences(kafka: Kafka, admin: AdminClient, timeout_s: float) -> list[str]:
    topics = _metadata(kafka, admin, timeout_s)
    missing = _missing(kafka, topics)
    found = [f"{kafka.topic(t.name)} is missing; `lagoon up` creates it" for t in missing]
    existing = [t for t in TOPICS.values() if t not in missing]
    configs = _configs(kafka, admin, existing, timeout_s)
    for topic in existing:
        name = kafka.topic(topic.name)
        found += _layout_differences(kafka, topic, topics[name])
        found += _config_differences(kafka, topic, configs[name])
    return found


def _layout_differences(kafka: Kafka, topic: Topic, metadata: TopicMetadata) -> list[str]:
    name, found = kafka.topic(topic.name), []
    declared, observed = partitions_of(kafka, topic), len(metadata.partitions)
    if observed != declared:
        mend = f"set kafka.partitions = {observed}, or delete the topic" if topic.partitioned else "delete the topic"
        found.append(f"{name} has {observed} partitions, expected {declared}; {mend} and let `lagoon up` create it")
    replicas = min((len(p.replicas) for p in metadata.partitions.values()), default=0)
    if replicas < kafka.replication:
        mend = f"set kafka.replication = {replicas}, or reassign its partitions"
        found.append(f"{name} has {replicas} replicas, expected {kafka.replication}; {mend}")
    return found


def _config_differences(kafka: Kafka, topic: Topic, observed: Mapping[str, Any]) -> list[str]:
    wrong = {k: v for k, v in topic.config(kafka).items() if _parts(observed[k].value) != _parts(v)}
    if not wrong:
        return []
    name = kafka.topic(topic.name)
    faults = ", ".join(f"{key} = {observed[key].value} (expected {value})" for key, value in wrong.items())
    mend = ",".join(f"{key}=[{value}]" for key, value in wrong.items())
    keeps = "compression.type" in wrong and observed["compression.type"].value == "producer"
    or_else = '; or set kafka.compression = "producer"' if keeps else ""
    return [
        f"{name} has {faults}; run kafka-configs.sh --bootstrap-server {kafka.brokers} --alter "
        f"--entity-type topics --entity-name {name} --add-config '{mend}'{or_else}"
    ]


def _parts(value: str) -> set[str]:
    """The parts of a setting; the order in `cleanup.policy` means nothing."""
    return set(value.split(","))


def _configs(kafka: Kafka, admin: AdminClient, topics: list[Topic], timeout_s: float) -> dict[str, Mapping[str, Any]]:
    if not topics:
        return {}
    resources = [ConfigResource(ResourceType.TOPIC, kafka.topic(t.name)) for t in topics]
    futures = admin.describe_configs(resources, request_timeout=timeout_s)
    try:
        return {resource.name: future.result() for resource, future in futures.items()}
    except KafkaException as error:
        raise broker_error(kafka, "reading the topics' settings", error) from error
