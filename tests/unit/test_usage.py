"""Usage intervals: what happened in each, never more busy time than there was time."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.usage import Usage
from schemas.errors import BrokerError
from schemas.messages import UsageInterval, decode

START = datetime(2026, 1, 1, tzinfo=UTC)


class FakeProducer:
    """Keeps what is sent; `fail` makes the next deliveries fail, `is_full` the next sends."""

    def __init__(self) -> None:
        self.intervals: list[UsageInterval] = []
        self.keys: list[str] = []
        self.fail = self.is_full = False

    def send(self, topic: str, key: str, value: bytes, *, on_delivery: Callable[[BrokerError | None], None]) -> None:
        assert topic == "usage"
        if self.is_full:
            raise BrokerError("the queue stayed full")
        on_delivery(BrokerError("away") if self.fail else None)
        if not self.fail:
            self.keys.append(key)
            self.intervals.append(decode(UsageInterval, value))


class Clock:
    """A monotonic and a wall clock that move when told."""

    def __init__(self) -> None:
        self.ns = 5_000_000_000
        self.wall = START

    def move(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)
        self.wall += timedelta(seconds=seconds)


def _usage(producer: FakeProducer, clock: Clock, interval_s: float = 2, accelerators: int = 1) -> Usage:
    return Usage(
        producer,
        "rollout",
        "rollout-0",
        "rollout",
        interval_s,
        num_accelerators=accelerators,
        clock=lambda: clock.ns,
        now=lambda: clock.wall,
    )


def test_of_a_shared_accelerator_only_the_time_counts_in_which_it_was_the_services_own() -> None:
    producer, clock, own = FakeProducer(), Clock(), [0.0]
    usage = Usage(
        producer, "r", "r-0", "rollout", 2, own_s=lambda: own[0], clock=lambda: clock.ns, now=lambda: clock.wall
    )
    clock.move(6)  # another's
    with usage.busy():
        clock.move(3)
    clock.move(1)
    own[0] = 4
    usage.tick()
    clock.move(5)  # another's again
    usage.tick()
    assert [(i.busy_s, i.idle_s, _seconds(i)) for i in producer.intervals] == [(3, 1, 10), (0, 0, 5)]


def _seconds(interval: UsageInterval) -> float:
    return (interval.ended_at - interval.started_at).total_seconds()


def test_three_intervals_of_1000_tokens_in_2_s_are_500_tokens_a_second_each_and_so_is_the_one_after_a_restart() -> None:
    producer, clock = FakeProducer(), Clock()
    for num_intervals in (3, 1):  # the second service is the first one, restarted
        usage = _usage(producer, clock)
        for _ in range(num_intervals):
            with usage.busy():
                clock.move(2)
            usage.add(tokens=1000)
            usage.tick()
    assert [i.num_tokens / _seconds(i) for i in producer.intervals] == [500, 500, 500, 500]
    assert [i.busy_s / _seconds(i) for i in producer.intervals] == [1, 1, 1, 1]
    assert len({i.interval_id for i in producer.intervals}) == 4


def test_nested_and_overlapping_busy_blocks_count_once() -> None:
    producer, clock = FakeProducer(), Clock()
    usage = _usage(producer, clock, interval_s=4)
    first, second = usage.busy(), usage.busy()
    with first:
        clock.move(1)
        second.__enter__()
        clock.move(1)
    clock.move(1)
    second.__exit__(None, None, None)
    clock.move(1)
    usage.tick()
    assert [(i.busy_s, i.idle_s) for i in producer.intervals] == [(3, 1)]


def test_a_busy_block_that_outlasts_an_interval_is_split_between_the_two() -> None:
    producer, clock = FakeProducer(), Clock()
    usage = _usage(producer, clock)
    clock.move(0.5)
    with usage.busy():
        clock.move(1.5)
        usage.tick()
        clock.move(0.25)
    clock.move(1.75)
    usage.tick()
    assert [(i.busy_s, i.idle_s) for i in producer.intervals] == [(1.5, 0.5), (0.25, 1.75)]


def test_seconds_are_multiplied_by_the_accelerators() -> None:
    producer, clock = FakeProducer(), Clock()
    usage = _usage(producer, clock, accelerators=4)
    with usage.busy():
        clock.move(0.5)
    clock.move(1.5)
    usage.tick()
    assert [(i.busy_s, i.idle_s, i.num_accelerators) for i in producer.intervals] == [(2, 6, 4)]


def test_nothing_is_sent_before_its_time_but_with_force() -> None:
    producer, clock = FakeProducer(), Clock()
    usage = _usage(producer, clock)
    usage.tick(force=True)  # no time has passed: there is no interval
    clock.move(1.9)
    usage.tick()
    assert producer.intervals == []
    usage.tick(force=True)
    assert [_seconds(i) for i in producer.intervals] == [1.9]


def test_totals_of_an_outbox_are_absolute_and_counts_are_per_interval() -> None:
    producer, clock = FakeProducer(), Clock()
    usage = _usage(producer, clock)
    usage.version(7)
    usage.produced("outbox-1", 10, 640)
    usage.add(tokens=64, episodes=1, failed=1)
    for _ in range(2):
        clock.move(2)
        usage.tick()
    first, second = producer.intervals
    assert (first.num_tokens, first.num_episodes, first.num_failed) == (64, 1, 1)
    assert (second.num_tokens, second.num_episodes, second.num_failed) == (0, 0, 0)
    for interval in (first, second):
        assert (interval.outbox, interval.produced_trajectories, interval.produced_tokens) == ("outbox-1", 10, 640)
        assert interval.weight_version == 7


def test_an_interval_that_kafka_did_not_take_is_sent_again_under_its_id() -> None:
    producer, clock = FakeProducer(), Clock()
    usage = _usage(producer, clock)
    usage.add(tokens=5)
    producer.fail = True
    clock.move(2)
    usage.tick()
    producer.fail = False
    clock.move(2)
    usage.tick()
    assert [(i.num_tokens, i.started_at) for i in producer.intervals] == [
        (5, START),
        (0, START + timedelta(seconds=2)),
    ]
    assert producer.keys == ["rollout-0", "rollout-0"]


def test_intervals_that_a_full_queue_refuses_are_sent_later_each_once() -> None:
    producer, clock = FakeProducer(), Clock()
    usage = _usage(producer, clock)
    producer.is_full = True
    for tokens in (5, 6):
        usage.add(tokens=tokens)
        clock.move(2)
        with pytest.raises(BrokerError):
            usage.tick()
    producer.is_full = False
    clock.move(2)
    usage.tick()
    assert [i.num_tokens for i in producer.intervals] == [5, 6, 0]


@pytest.mark.parametrize("jump_s", [-3600, -0.5, 0.5])
def test_intervals_never_overlap_when_the_wall_clock_is_set(jump_s: float) -> None:
    producer, clock = FakeProducer(), Clock()
    usage = _usage(producer, clock)
    for _ in range(2):
        clock.move(2)
        clock.wall += timedelta(seconds=jump_s)
        usage.tick()
    first, second = producer.intervals
    assert (first.ended_at, _seconds(first), _seconds(second)) == (second.started_at, 2, 2)


def test_after_a_sleep_of_the_machine_the_next_interval_starts_at_the_true_time() -> None:
    producer, clock = FakeProducer(), Clock()
    usage = _usage(producer, clock)
    for _ in range(2):
        clock.move(2)
        clock.wall += timedelta(hours=1)
        usage.tick()
    assert producer.intervals[1].started_at == START + timedelta(hours=1, seconds=2)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("move"), st.integers(0, 3_000_000)),
        st.tuples(st.just("enter"), st.just(0)),
        st.tuples(st.just("exit"), st.just(0)),
        st.tuples(st.just("add"), st.integers(0, 1000)),
        st.tuples(st.just("tick"), st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS, st.integers(1, 8))
def test_busy_and_idle_add_up_to_the_time_there_was_and_tokens_to_those_added(
    actions: list[tuple[str, int]], accelerators: int
) -> None:
    producer, clock = FakeProducer(), Clock()
    usage, blocks, tokens = _usage(producer, clock, accelerators=accelerators), [], 0
    for action, amount in actions:
        if action == "move":
            clock.move(amount / 1e6)
        elif action == "enter":
            blocks.append(usage.busy())
            blocks[-1].__enter__()
        elif action == "exit" and blocks:
            blocks.pop(0).__exit__(None, None, None)
        elif action == "add":
            usage.add(tokens=amount)
            tokens += amount
        elif action == "tick":
            usage.tick()
    clock.move(1)
    usage.tick(force=True)
    for interval in producer.intervals:
        assert interval.busy_s + interval.idle_s == pytest.approx(_seconds(interval) * accelerators)
    assert sum(i.num_tokens for i in producer.intervals) == tokens
    assert sum(_seconds(i) for i in producer.intervals) == pytest.approx((clock.ns - 5_000_000_000) / 1e9)
