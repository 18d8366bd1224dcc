"""From outbox to Kafka: in order, one message in flight per partition, until it is taken."""

from pathlib import Path

from inference.outbox import Outbox
from inference.packs import Packer
from inference.sender import Sender
from schemas.errors import BrokerError
from schemas.ids import partition_of
from schemas.names import Header
from tests.rollout_fakes import FakeProducer, episode, task

MAX_BYTES = 1024 * 1024


def _sender(folder: Path, producer: FakeProducer) -> tuple[Sender, Outbox]:
    outbox = Outbox(folder, MAX_BYTES)
    return Sender(outbox, Packer(linger_s=0), producer, num_partitions=4, retry_s=0), outbox


def _sequences(producer: FakeProducer) -> list[int]:
    return [int(headers[Header.SEQUENCE]) for _, _, headers in producer.sent]


def test_the_next_message_of_a_partition_waits_for_the_one_before(tmp_path: Path) -> None:
    producer = FakeProducer()
    sender, outbox = _sender(tmp_path, producer)
    for draw in range(3):
        sender.finished(episode(task(draw)))
    sender.send()
    sender.send()
    assert _sequences(producer) == [1]
    producer.poll()
    sender.send()
    assert _sequences(producer) == [1, 2]
    producer.poll()
    sender.send()
    producer.poll()
    assert _sequences(producer) == [1, 2, 3]
    assert outbox.is_empty


def test_a_message_that_kafka_did_not_take_goes_again_unchanged_and_before_later_ones(tmp_path: Path) -> None:
    producer = FakeProducer()
    sender, outbox = _sender(tmp_path, producer)
    for draw in range(2):
        sender.finished(episode(task(draw)))
    producer.error = BrokerError("no answer from Kafka")
    sender.send()
    producer.poll()
    assert sender.error is producer.error
    assert not outbox.is_empty
    producer.error = None
    for _ in range(3):
        sender.send()
        producer.poll()
    assert producer.sent[0] == producer.sent[1]
    assert _sequences(producer) == [1, 1, 2]
    assert sender.error is None
    assert outbox.is_empty


def test_what_an_earlier_life_left_is_sent_once_more_under_the_same_sequence(tmp_path: Path) -> None:
    before = FakeProducer()
    sender, outbox = _sender(tmp_path, before)
    sender.finished(episode(task()))
    sender.send()  # and killed before the answer
    outbox.append(episode(task(1)))  # finished, never packed
    outbox.close()
    after = FakeProducer()
    sender, outbox = _sender(tmp_path, after)
    for _ in range(2):
        sender.send()
        after.poll()
    assert after.sent[0] == before.sent[0]
    assert _sequences(after) == [1, 2]
    assert outbox.is_empty


def test_a_group_goes_to_the_partition_of_its_task(tmp_path: Path) -> None:
    producer = FakeProducer()
    sender, _ = _sender(tmp_path, producer)
    for index in range(8):
        sender.finished(episode(task(index=index)))
    for _ in range(8):
        sender.send()
        producer.poll()
    assert sorted(p for p, _, _ in producer.sent) == sorted(partition_of(f"add/{i}", 4) for i in range(8))
