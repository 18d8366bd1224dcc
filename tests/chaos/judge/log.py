"""The `trajectories` topic as a stranger reads it: a plain consumer, and pyarrow for the bodies."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from confluent_kafka import Consumer, Message, TopicPartition

from infra.claims import Claims
from schemas.errors import ContractError
from schemas.settings import Settings

READ_S = 60.0


@dataclass(frozen=True, slots=True)
class Produced:
    """A trajectory as it lies in the log."""

    trajectory_id: str
    group_id: str
    min_weight_version: int
    tokens: int
    outbox: str


def produced(settings: Settings) -> tuple[list[Produced], list[str]]:
    """Every trajectory of the log, a repeated message counted once; and faults: repeats that differ, broken bodies."""
    seen: dict[tuple[str, int, str], bytes] = {}
    found: list[Produced] = []
    faults: list[str] = []
    claims = Claims.of(settings)
    for message in _messages(settings):
        headers = {name: bytes(value or b"") for name, value in message.headers() or []}
        outbox, sequence = (headers.get(f"lagoon-{name}", b"").decode() for name in ("outbox", "seq"))
        place = (outbox, message.partition() or 0, sequence)
        body = message.value() or b""
        if place in seen:
            if seen[place] != body:
                faults.append(f"outbox {outbox} has sent sequence {sequence} twice, with different content")
            continue
        seen[place] = body
        try:
            found += _rows(claims.body(headers, body), outbox)
        except (pa.ArrowException, ContractError) as error:
            faults.append(f"message {message.partition()}/{message.offset()} cannot be read: {error}")
    return found, faults


def _rows(body: bytes, outbox: str) -> Iterator[Produced]:
    table = pa.ipc.open_stream(body).read_all()
    for row in table.select(["trajectory_id", "group_id", "min_weight_version", "token_ids"]).to_pylist():
        tokens = len(row["token_ids"])
        yield Produced(row["trajectory_id"], row["group_id"], row["min_weight_version"], tokens, outbox)


def _messages(settings: Settings) -> Iterator[Message]:
    """All messages of the topic, partition by partition, up to the ends of now."""
    topic = settings.kafka.topic("trajectories")
    consumer = Consumer(
        {"bootstrap.servers": settings.kafka.brokers, "group.id": "chaos-judge", "enable.auto.commit": False}
    )
    try:
        for partition in range(settings.kafka.partitions):
            first, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=READ_S)
            if first:
                raise AssertionError(f"{topic}/{partition} has lost its first {first} messages: nothing can be judged")
            consumer.assign([TopicPartition(topic, partition, 0)])
            at = 0
            while at < end:
                message = consumer.poll(READ_S)
                if message is None or message.error():
                    raise AssertionError(f"{topic}/{partition} cannot be read at {at} of {end}: {message}")
                at = (message.offset() or 0) + 1
                yield message
    finally:
        consumer.close()
