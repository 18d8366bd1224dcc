"""The sources and the sink against a real broker: order, ends, byte caps, transactions, a broker that dies."""

import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import bytewax.operators as op
import confluent_kafka
import pytest
from bytewax.dataflow import Dataflow
from bytewax.errors import BytewaxRuntimeError
from bytewax.inputs import Source
from bytewax.testing import TestingSink, TestingSource, run_main

from flows.connectors import parts
from flows.connectors.items import Clock, Raw, Tick
from flows.connectors.kafka_sink import KafkaSink, kafka_output
from flows.connectors.kafka_source import MergeSource, TopicsSource
from flows.connectors.refetch import Refetch
from infra.claims import Claims
from infra.kafka import Follower, Producer, ensure_topics
from infra.stack.kafka import LocalKafka
from infra.stack.ports import free_port
from schemas.errors import BrokerError
from schemas.messages import WeightSummary
from schemas.settings import Kafka
from tests import odd_header
from tests.conftest import ROOT
from tests.flows.test_records import WEIGHT

pytestmark = pytest.mark.kafka


class Enough:
    """True once `condition` holds: stops a source."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self.condition = condition

    def __bool__(self) -> bool:
        return self.condition()


def emitted(source: Source[Any], into: list[Any] | None = None, epoch_s: float = 0.1) -> list[Any]:
    """What `source` emits until it ends."""
    out: list[Any] = [] if into is None else into
    flow = Dataflow("test")
    op.output("out", op.input("in", flow, source), TestingSink(out))
    run_main(flow, epoch_interval=timedelta(seconds=epoch_s))
    return out


def merge(kafka: Kafka, **options: Any) -> MergeSource:
    options = {"epoch_bytes": 1 << 20, "skip_expired": False, "client_id": "test", "stop_at_end": True} | options
    return MergeSource(kafka, ["trajectories", "weights", "control"], **options)


def topics(kafka: Kafka, *names: str, **options: Any) -> TopicsSource:
    options = {"epoch_bytes": 1 << 20, "skip_expired": False, "client_id": "test", "stop_at_end": True} | options
    return TopicsSource(kafka, names, **options)


def lanes(items: list[Any]) -> dict[int, list[Raw]]:
    found: dict[int, list[Raw]] = {}
    for item in items:
        if isinstance(item, Raw):
            found.setdefault(item.lane, []).append(item)
    return found


def send_mixed(kafka: Kafka, rounds: int) -> None:
    """Five messages a round, each acknowledged before the next, so that their order is known to the broker alone."""
    producer = Producer(kafka, "test")
    for n in range(rounds):
        for topic, partition in (("trajectories", n % 4), ("control", 0), ("trajectories", (n * 3) % 4)):
            producer.send(topic, f"{n}", b"x" * 100, partition=partition)
            producer.flush(10)
        producer.send("weights", f"{n}", b"x")
        producer.send("trajectories", f"{n}", b"x", partition=0)
    producer.close()


def test_a_live_run_and_its_replay_see_one_order(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_topics(kafka)
    total = 40 * 3 + 2 * 4 * 40  # data once, two side topics in each of four lanes
    live: list[Any] = []
    sender = Thread(target=send_mixed, args=(kafka, 40))
    sender.start()
    count = Enough(lambda: sum(isinstance(x, Raw) for x in live) >= total)
    emitted(merge(kafka, stop_at_end=False, stop=count), live)
    sender.join()
    replay = emitted(merge(kafka))
    monkeypatch.setattr(parts, "MAX_WAITING_BYTES", 150)
    halting = emitted(merge(kafka))
    assert sum(isinstance(x, Raw) for x in live) == total
    assert lanes(live) == lanes(replay) == lanes(halting)
    for lane, items in lanes(live).items():
        times = [item.timestamp for item in items]
        assert times == sorted(times)
        assert {i.partition for i in items if i.topic == "trajectories"} == {lane}


def test_every_epoch_begins_with_a_tick_and_keeps_to_its_bytes(kafka: Kafka) -> None:
    ensure_topics(kafka)
    producer = Producer(kafka, "test")
    for _ in range(50):
        producer.send("usage", "k", b"x" * 100)
    producer.close()
    items = emitted(topics(kafka, "usage", epoch_bytes=1000), epoch_s=0.02)
    assert items[0] == items[-1] == Tick()
    epochs: list[int] = []
    for item in items:
        if isinstance(item, Tick):
            epochs.append(0)
        else:
            epochs[-1] += item.num_bytes
    assert sum(epochs) == 50 * 101
    assert max(epochs) < 5000


def test_markers_of_transactions_do_not_hide_the_end(kafka: Kafka) -> None:
    ensure_topics(kafka)
    settings = {"bootstrap.servers": kafka.brokers, "transactional.id": kafka.topic_prefix}
    producer = confluent_kafka.Producer(settings)
    producer.init_transactions(30)
    for n in range(10):
        producer.begin_transaction()
        producer.produce(kafka.topic("trajectories"), b"%d" % n, partition=2)
        producer.produce(kafka.topic("control"), b"%d" % n, key=b"k")
        producer.commit_transaction(30) if n != 7 else producer.abort_transaction(30)
    confluent_kafka.Producer(settings).init_transactions(30)  # the last marker is written after its call returns
    bodies = [b"%d" % n for n in range(10) if n != 7]
    merged = lanes(emitted(merge(kafka)))[2]
    assert [i.value for i in merged if i.topic == "trajectories"] == bodies
    assert [i.value for i in merged if i.topic == "control"] == bodies
    assert [i.value for i in emitted(topics(kafka, "control")) if isinstance(i, Raw)] == bodies


def test_a_message_with_a_header_that_no_text_can_name_is_read_as_one_without_headers(kafka: Kafka) -> None:
    ensure_topics(kafka)
    producer = Producer(kafka, "test")
    for _ in range(32):  # what is called often, Python calls in another way
        producer.send("trajectories", "k", b"sound", partition=0, headers={"h": b"1"})
    producer.flush(30)
    odd_header.send(kafka.brokers, kafka.topic("trajectories"), b"\xff\xfe", b"odd")
    producer.send("trajectories", "k", b"sound", partition=0, headers={"h": b"1"})
    producer.close()
    items = [(item.headers, item.value) for item in lanes(emitted(merge(kafka)))[0]]
    sound = ((("h", b"1"),), b"sound")
    assert items == [*[sound] * 32, ((), b"odd"), sound]
    assert Refetch(kafka, "trajectories", "test", Claims("memory:///")).read(0, 32) == b"odd"


def test_the_clock_ticks_at_the_boundary_only(kafka: Kafka) -> None:
    ensure_topics(kafka)
    out: list[Any] = []
    stop = Enough(lambda: sum(isinstance(x, Clock) for x in out) >= 3)
    emitted(topics(kafka, "control", tick_s=0.01, stop_at_end=False, stop=stop), out)
    times = [x.now_ms for x in out if isinstance(x, Clock)]
    assert len(times) >= 3
    assert times == sorted(times)
    assert not any(isinstance(x, Clock) for x in emitted(topics(kafka, "control", tick_s=0.01)))


@pytest.mark.parametrize("make", [merge, lambda kafka: topics(kafka, "control")])
def test_a_broker_that_stays_away_ends_the_flow_with_its_reason(make: Callable[[Kafka], Source[Any]]) -> None:
    with pytest.raises(BytewaxRuntimeError) as raised:
        emitted(make(Kafka(brokers="127.0.0.1:1", timeout_s=1.0)))
    cause = raised.value.__cause__
    while not isinstance(cause, BrokerError):
        assert cause is not None
        cause = cause.__cause__
    assert "the broker has been away" in str(cause)
    assert "kafka.timeout_s" in str(cause)


def test_what_the_sink_took_is_delivered_when_the_epoch_ends(kafka: Kafka) -> None:
    ensure_topics(kafka)
    flow = Dataflow("sink")
    messages = op.input("in", flow, TestingSource([("3", WEIGHT), ("4", WEIGHT.to_bytes())]))
    kafka_output("out", messages, KafkaSink(kafka, "weights", "test"))
    run_main(flow)
    follower = Follower(kafka, "weights", WeightSummary, "test")
    assert list(follower.poll()) == [WEIGHT, WEIGHT]
    follower.close()


def test_a_sink_that_cannot_deliver_fails_its_epoch() -> None:
    part = KafkaSink(Kafka(brokers="127.0.0.1:1", timeout_s=0.5), "weights", "test").build_part("s", "p000", None)
    part.write_batch([("3", WEIGHT)])
    with pytest.raises(BrokerError):
        part.snapshot()


@pytest.mark.slow
def test_a_flow_outlives_its_broker(tmp_path: Path) -> None:
    local = LocalKafka(ROOT / ".lagoon" / "kafka", tmp_path / "data", free_port(), free_port())
    kafka = Kafka(brokers=local.address, partitions=1, timeout_s=200)
    out: list[Any] = []
    process = start(local)
    try:
        ensure(kafka, process)
        source = merge(kafka, stop_at_end=False, stop=Enough(lambda: len(bodies(out)) >= 60))
        flow = Thread(target=emitted, args=(source, out), daemon=True)
        flow.start()
        send_numbers(kafka, 0, 30)
        wait_until(lambda: len(bodies(out)) >= 10)
        process.kill()
        process.wait()
        process = start(local)
        ensure(kafka, process)
        send_numbers(kafka, 30, 60)
        flow.join(200)
        assert not flow.is_alive()
    finally:
        process.kill()
        process.wait()
    assert bodies(out) == [b"%d" % n for n in range(60)]


def bodies(items: list[Any]) -> list[bytes]:
    return [item.value for item in list(items) if isinstance(item, Raw)]


def start(local: LocalKafka) -> subprocess.Popen[bytes]:
    return subprocess.Popen(local.prepare(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ensure(kafka: Kafka, process: subprocess.Popen[bytes]) -> None:
    """Topics on a broker that is still starting."""

    def done() -> bool:
        assert process.poll() is None
        try:
            ensure_topics(kafka, 5)
        except BrokerError:
            return False
        return True

    wait_until(done)


def send_numbers(kafka: Kafka, first: int, end: int) -> None:
    producer = Producer(kafka, "test")
    for n in range(first, end):
        producer.send("trajectories", "k", b"%d" % n, partition=0)
    producer.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)
