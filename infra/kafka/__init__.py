"""Kafka: a producer whose errors surface, consumers that never skip, topics as declared, followers of small topics."""

from infra.kafka.client import administrator, client_settings, consumer
from infra.kafka.follower import Follower
from infra.kafka.producer import Producer
from infra.kafka.topics import cluster_id, ensure_topics, topic_differences

__all__ = [
    "Follower",
    "Producer",
    "administrator",
    "client_settings",
    "cluster_id",
    "consumer",
    "ensure_topics",
    "topic_differences",
]
