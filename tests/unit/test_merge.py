"""The merged order is a function of the logs: no interleaving of appends, fetches, rounds and restarts changes it."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from flows.connectors.items import Hole, Raw
from flows.connectors.merge import Merge

TOPICS = ("trajectories", "weights", "control")


def raw(topic: str, offset: int, timestamp: int) -> Raw:
    return Raw(topic, 0, offset, timestamp, None, (), b"x" * 10)


@dataclass
class Broker:
    """Logs that stamp messages with one clock when they append them, as Kafka's LogAppendTime does."""

    now: int = 1
    logs: dict[str, list[Raw]] = field(default_factory=lambda: {t: [] for t in TOPICS})
    ends: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOPICS, 0))

    def append(self, topic: str, passed_ms: int, gap: int = 0) -> None:
        """One message; `gap` offsets before it hold none, as after a transaction or a compaction."""
        self.now += passed_ms
        offset = self.ends[topic] + gap
        self.logs[topic].append(raw(topic, offset, self.now))
        self.ends[topic] = offset + 1

    def order(self) -> list[tuple[str, int]]:
        """What must come out."""
        messages = [m for log in self.logs.values() for m in log]
        return coordinates(sorted(messages, key=lambda m: (m.timestamp, TOPICS.index(m.topic), m.offset)))


class Reading:
    """A source partition: fetches from the broker into a merge, and what it has emitted, over restarts."""

    def __init__(self, broker: Broker, bounded: bool = False) -> None:
        self.broker, self.merge = broker, Merge(TOPICS, bounded=bounded)
        self.fetched = dict.fromkeys(TOPICS, 0)
        self.taken: list[Raw | Hole] = []

    def round(self, ends: dict[str, int]) -> None:
        self.merge.round(ends)

    def fetch(self, topic: str, most: int) -> None:
        log = [m for m in self.broker.logs[topic] if m.offset >= self.fetched[topic]]
        for message in log[:most]:
            self.merge.add(message)
            self.fetched[topic] = message.next_offset
        if len(log) <= most:  # the client tells of an end only when it gets there
            self.merge.reached(topic, self.broker.ends[topic])
            self.fetched[topic] = max(self.fetched[topic], self.broker.ends[topic])

    def take(self, most: int) -> None:
        self.taken += self.merge.take(most, 1 << 20)

    def restart(self) -> None:
        state = self.merge.state()
        self.merge = Merge(TOPICS, state)
        self.fetched = {t: state[t][0] if t in state else 0 for t in TOPICS}


def coordinates(items: list[Raw] | list[Raw | Hole]) -> list[tuple[str, int]]:
    return [(item.topic, item.offset) for item in items]


topics = st.sampled_from(TOPICS)
appends = st.tuples(st.just("append"), topics, st.integers(0, 1), st.sampled_from([0, 0, 0, 1]))
fetches = st.tuples(st.just("fetch"), topics, st.integers(0, 3))
takes = st.tuples(st.just("take"), st.integers(1, 3))
pumps = st.tuples(st.just("pump"))
rounds = st.tuples(st.just("round"), st.lists(st.one_of(appends, pumps), max_size=3))
restarts = st.tuples(st.just("restart"))
actions = st.lists(st.one_of(appends, appends, pumps, pumps, rounds, rounds, fetches, takes, restarts), max_size=80)


def act(broker: Broker, reading: Reading, action: tuple) -> None:
    match action:
        case ("append", topic, passed_ms, gap):
            broker.append(topic, passed_ms, gap)
        case ("fetch", topic, most):
            reading.fetch(topic, most)
        case ("take", most):
            reading.take(most)
        case ("pump",):
            pump(reading)
        case ("restart",):
            reading.restart()
        case ("round", meanwhile):
            ask(broker, reading, meanwhile)


def ask(broker: Broker, reading: Reading, meanwhile: list[tuple] = []) -> None:  # noqa: B006
    """A round of end offsets, some time after the last one; the logs answer one after another, life goes on."""
    broker.now += 1
    ends, between = {}, list(meanwhile)
    for topic in TOPICS:
        ends[topic] = broker.ends[topic]
        if between:
            act(broker, reading, between.pop())
    reading.round(ends)


def pump(reading: Reading) -> None:
    """Read and take all there is, as a source does again and again."""
    for topic in TOPICS:
        reading.fetch(topic, 1 << 20)
    reading.take(1 << 20)


def finish(broker: Broker, reading: Reading) -> None:
    """Nothing is appended any more; three rounds let everything out."""
    for _ in range(3):
        ask(broker, reading)
        pump(reading)


@settings(max_examples=400)
@given(actions)
def test_any_interleaving_gives_the_same_order(script: list[tuple]) -> None:
    broker = Broker()
    reading = Reading(broker)
    for action in script:
        act(broker, reading, action)
    finish(broker, reading)
    assert coordinates(reading.taken) == broker.order()
    assert reading.merge.num_late == 0


@given(actions, actions)
def test_a_bounded_merge_gives_what_the_logs_held_at_its_start(before: list[tuple], after: list[tuple]) -> None:
    broker = Broker()
    for action in before:
        if action[0] == "append":
            act(broker, Reading(broker), action)
    expected = broker.order()
    reading = Reading(broker, bounded=True)
    ask(broker, reading)
    for action in after:
        if action[0] != "restart":
            act(broker, reading, action)
    finish(broker, reading)
    assert coordinates(reading.taken) == expected
    assert reading.merge.is_complete


def test_at_one_timestamp_data_comes_before_its_side_topics() -> None:
    broker = Broker()
    for topic in ("control", "weights", "trajectories"):
        broker.append(topic, 0)
    reading = Reading(broker)
    finish(broker, reading)
    assert coordinates(reading.taken) == [("trajectories", 0), ("weights", 0), ("control", 0)]


def test_a_message_waits_while_an_earlier_one_may_still_come() -> None:
    merge = Merge(TOPICS)
    merge.round({"trajectories": 1, "weights": 1, "control": 0})
    merge.add(raw("trajectories", 0, 20))
    assert merge.take(10, 100) == []  # weights/0 is not read: it may be older
    merge.add(raw("weights", 0, 10))
    assert merge.take(10, 100) == []  # control is read to its end, but may have grown before 10
    merge.round({"trajectories": 1, "weights": 1, "control": 0})
    assert coordinates(merge.take(10, 100)) == [("weights", 0), ("trajectories", 0)]


def test_a_message_read_beyond_the_known_end_settles_nothing_before_two_rounds() -> None:
    merge = Merge(TOPICS)
    merge.round({"trajectories": 0, "weights": 0, "control": 0})
    merge.add(raw("control", 0, 10))  # appended after the first round
    merge.round({"trajectories": 0, "weights": 0, "control": 1})
    assert merge.take(10, 100) == []  # trajectories may have grown at 10, after its end was asked for
    merge.round({"trajectories": 1, "weights": 0, "control": 1})
    merge.add(raw("trajectories", 0, 10))
    assert coordinates(merge.take(10, 100)) == [("trajectories", 0), ("control", 0)]


def test_many_messages_of_one_millisecond_do_not_block_one_another() -> None:
    merge = Merge(TOPICS)
    merge.round({"trajectories": 1000, "weights": 1000, "control": 1000})
    for offset in range(3):
        merge.add(raw("trajectories", offset, 5))
        merge.add(raw("weights", offset, 5))
        merge.add(raw("control", offset, 5))
    assert coordinates(merge.take(10, 1000)) == [("trajectories", 0), ("trajectories", 1), ("trajectories", 2)]


def test_a_clock_that_goes_back_within_a_log_is_held_at_its_largest_time() -> None:
    merge = Merge(TOPICS)
    merge.round({"trajectories": 2, "weights": 0, "control": 0})
    merge.add(raw("trajectories", 0, merge.timestamp("trajectories", 50)))
    assert merge.timestamp("trajectories", 40) == 50
    assert Merge(TOPICS, {"trajectories": (1, 50)}).timestamp("trajectories", 40) == 50


def test_taking_stops_once_the_bytes_are_used_up() -> None:
    merge = Merge(TOPICS, bounded=True)
    merge.round({"trajectories": 4, "weights": 0, "control": 0})
    for offset in range(4):
        merge.add(raw("trajectories", offset, offset))
    assert len(merge.take(10, 15)) == 2  # 10 bytes each: the second exceeds 15
    assert merge.waiting_bytes("trajectories") == 20


def test_a_message_that_becomes_visible_too_late_is_counted() -> None:
    merge = Merge(TOPICS)
    for _ in range(2):
        merge.round({"trajectories": 0, "weights": 0, "control": 1})
        merge.reached("control", 0)
        merge.add(raw("control", 0, 30)) if merge.waiting_bytes("control") == 0 else None
    assert coordinates(merge.take(10, 100)) == [("control", 0)]
    merge.round({"trajectories": 1, "weights": 0, "control": 1})
    merge.add(raw("trajectories", 0, 20))
    assert coordinates(merge.take(10, 100)) == [("trajectories", 0)]
    assert merge.num_late == 1
