"""The local stack, really started."""

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from schemas.settings import Kafka

pytestmark = pytest.mark.kafka


def test_the_broker_keeps_what_it_is_sent(kafka: Kafka) -> None:
    topic = kafka.topic("greetings")
    admin = AdminClient({"bootstrap.servers": kafka.brokers})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(10)
    producer = Producer({"bootstrap.servers": kafka.brokers})
    producer.produce(topic, b"hello")
    assert producer.flush(10) == 0
    consumer = Consumer({"bootstrap.servers": kafka.brokers, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    message = consumer.poll(20)
    consumer.close()
    assert message is not None
    assert message.value() == b"hello"
