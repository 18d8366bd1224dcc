"""From outbox to Kafka: in order, one message in flight per partition, until it is taken."""

import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from inference import sender as sender_module
from inference.outbox import Outbox
from inference.packs import Packer
from inference.sender import MESSAGE_OVERHEAD, Sender
from infra.claims import Claims
from schemas import wire
from schemas.errors import BrokerError
from schemas.ids import partition_of
from schemas.messages import Task
from schemas.names import Header
from schemas.trajectory import Trajectory, from_batch
from tests.rollout_fakes import FakeProducer, episode, task

MAX_BYTES = 1024 * 1024
MAX_MESSAGE_BYTES = 64 * 1024


def _sender(folder: Path, producer: FakeProducer) -> tuple[Sender, Outbox]:
    outbox = Outbox(folder, MAX_BYTES)
    claims = Claims(str(folder / "claims"))
    sender = Sender(
        outbox, Packer(linger_s=0), producer, claims, num_partitions=4, max_message_bytes=MAX_MESSAGE_BYTES, retry_s=0
    )
    return sender, outbox


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


def _until_empty(sender: Sender, outbox: Outbox, producer: FakeProducer, limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while not outbox.is_empty:
        assert time.monotonic() < deadline, sender.error
        sender.send(force=True)
        producer.poll()
        time.sleep(0.001)


def _rows(folder: Path, producer: FakeProducer) -> list[list[Trajectory]]:
    claims = Claims(str(folder / "claims"))
    return [from_batch(wire.decode(claims.body(headers, body))) for _, body, headers in producer.sent]


@settings(max_examples=25)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=16))
def test_any_sizes_arrive_in_order_and_once_in_messages_that_kafka_takes(sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        producer = FakeProducer()
        sender, outbox = _sender(Path(name), producer)
        sent = [episode(task(), index, num_tokens) for index, num_tokens in enumerate(sizes)]
        for one in sent:
            sender.finished(one)
        _until_empty(sender, outbox, producer)
        assert [row for rows in _rows(Path(name), producer) for row in rows] == sent
        assert _sequences(producer) == list(range(1, len(producer.sent) + 1))
        assert all(len(body) + MESSAGE_OVERHEAD <= MAX_MESSAGE_BYTES for _, body, _ in producer.sent)
        counted = [(int(h[Header.NUM_ROWS]), int(h[Header.NUM_TOKENS])) for _, _, h in producer.sent]
        assert counted == [(len(r), sum(len(t.token_ids) for t in r)) for r in _rows(Path(name), producer)]
        outbox.close()


def test_a_restart_between_the_halves_of_a_pack_sends_each_half_once(tmp_path: Path) -> None:
    before = FakeProducer()
    sender, outbox = _sender(tmp_path, before)
    sent = [episode(task(), index, 4000) for index in range(4)]  # 38 kB each: one a message
    for one in sent:
        sender.finished(one)
    sender.send(force=True)
    before.poll()  # the first is acknowledged, the second on its way, the rest fixed but not sent
    sender.send()
    outbox.close()
    after = FakeProducer()
    sender, outbox = _sender(tmp_path, after)
    _until_empty(sender, outbox, after)
    assert (_sequences(before), _sequences(after)) == ([1, 2], [2, 3, 4])
    assert after.sent[0] == before.sent[1]
    assert [r for rows in [*_rows(tmp_path, before), *_rows(tmp_path, after)[1:]] for r in rows] == sent


def test_a_store_of_claims_that_is_away_is_the_reason_and_holds_up_its_own_partition_only(tmp_path: Path) -> None:
    producer = FakeProducer()
    (tmp_path / "claims").write_bytes(b"not a folder")
    sender, outbox = _sender(tmp_path, producer)
    large, small = (
        task(index=0),
        next(t for t in map(_task, range(1, 99)) if _partition(t) != _partition(task(index=0))),
    )
    sender.finished(episode(large, num_tokens=20_000))
    sender.finished(episode(small))
    deadline = time.monotonic() + 20
    while sender.error is None or not producer.sent:
        assert time.monotonic() < deadline
        sender.send(force=True)
        producer.poll()
    sender.send()
    producer.poll()
    assert "takes no objects" in str(sender.error)
    assert [partition for partition, _, _ in producer.sent] == [_partition(small)]
    assert outbox.partitions == [_partition(large)]
    (tmp_path / "claims").unlink()
    _until_empty(sender, outbox, producer)
    assert sender.error is None
    assert {r.group_id for rows in _rows(tmp_path, producer) for r in rows} == {large.group_id, small.group_id}


def test_what_no_claim_may_hold_is_set_aside_and_reported_by_a_message_that_counts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "MAX_CLAIM_BYTES", 100_000)  # 64 MiB would take a while
    producer = FakeProducer()
    sender, outbox = _sender(tmp_path, producer)
    vast = episode(task(), num_tokens=20_000)
    sender.finished(vast)
    _until_empty(sender, outbox, producer)
    [(partition, _, headers)] = producer.sent
    assert (headers[Header.NUM_ROWS], headers[Header.NUM_TOKENS]) == (b"1", b"20000")
    kept = (tmp_path / f"oversized-{partition}-1.arrow").read_bytes()
    assert from_batch(wire.decode(kept)) == [vast]
    assert headers[Header.CLAIM] == str(len(kept)).encode()
    assert not (tmp_path / "claims").exists()


def test_what_is_set_aside_is_written_and_counted_once_however_often_its_message_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "MAX_CLAIM_BYTES", 100_000)
    counted, producer, seen = _num_set_aside(), FakeProducer(), set[tuple[int, int]]()
    producer.error = BrokerError("no answer from Kafka")
    for life in range(2):
        sender, outbox = _sender(tmp_path, producer)
        if not life:
            sender.finished(episode(task(), num_tokens=20_000))
        for _ in range(3):
            sender.send(force=True)
            producer.poll()
            [kept] = tmp_path.glob("oversized-*")
            seen.add((kept.stat().st_ino, kept.stat().st_mtime_ns))
        outbox.close()
    assert len(producer.sent) == 6
    assert (_num_set_aside() - counted, len(seen)) == (1, 1)


def _num_set_aside() -> float:
    return REGISTRY.get_sample_value("lagoon_outbox_set_aside_total") or 0.0


def _task(index: int) -> Task:
    return task(index=index)


def _partition(of: Task) -> int:
    return partition_of(of.task_id, 4)
