"""From messages to chunks: order, dead letters, repeats, routing."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.connectors.items import Hole, Raw
from flows.steps.chunk import Note, Pack
from flows.steps.decode import MAX_OUTBOXES, Sequences, decode
from flows.steps.route import shards
from schemas.ids import shard_of
from schemas.messages import WeightSummary
from schemas.names import NUM_SHARDS, Header
from schemas.replay import REPLAYED
from tests.samples import T0_MS, broken, clock, group, message, trajectory, weights

SHARD = shard_of("add/7")


def repeats(*messages: Raw, sequences: Sequences | None = None) -> list[bool]:
    chunk = decode(SHARD, messages, {} if sequences is None else sequences)
    return [event.redelivered for event in chunk.events if isinstance(event, Pack)]


def test_packs_and_notes_keep_the_order_of_the_log() -> None:
    items = [message(group("a", [0.0, 1.0]), 0), weights(2, 0), message(group("b", [1.0]), 1), clock(0, 1)]
    chunk = decode(SHARD, items, {})
    assert [type(e).__name__ for e in chunk.events] == ["Pack", "Note", "Pack", "Note"]
    assert [(e.start, e.stop) for e in chunk.events if isinstance(e, Pack)] == [(0, 2), (2, 3)]
    assert chunk.rows.column("reward").to_pylist() == [0.0, 1.0, 1.0]
    note = chunk.events[1]
    assert isinstance(note, Note)
    assert isinstance(note.message, WeightSummary)
    assert note.at_ms == T0_MS


def test_an_unreadable_message_is_kept_byte_for_byte_and_counted_by_its_headers() -> None:
    letter = decode(SHARD, [broken(5, rows=3, tokens=18)], {}).dead_letters[0].to_pylist()[0]
    assert letter["value"] == b"\xff\x00 this is not Arrow"
    assert (letter["offset"], letter["num_rows"], letter["num_tokens"]) == (5, 3, 18)
    assert letter["kind"] == "undecodable"
    assert letter["error"]


@pytest.mark.parametrize(("said", "rows", "tokens"), [(10**18 - 1, 16, 20), (17, 16, 17), (0, 1, 0)])
def test_a_letter_counts_no_more_than_a_message_can_hold_and_no_less_than_one_trajectory(
    said: int, rows: int, tokens: int
) -> None:
    letter = decode(SHARD, [broken(5, rows=said, tokens=said)], {}).dead_letters[0].to_pylist()[0]
    assert (letter["num_rows"], letter["num_tokens"]) == (rows, tokens)


def test_an_unreadable_directive_is_one_dead_letter_that_counts_no_trajectories() -> None:
    bad = dataclasses.replace(clock(3, 0), value=b"{", headers=broken(0).headers)
    assert decode(SHARD, [bad], {}).dead_letters == ()
    assert decode(0, [bad], {}).dead_letters[0].to_pylist()[0]["num_rows"] == 0


def test_a_hole_is_a_dead_letter() -> None:
    letter = decode(SHARD, [Hole("trajectories", 0, 100, 500, T0_MS)], {}).dead_letters[0].to_pylist()[0]
    assert (letter["kind"], letter["offset"]) == ("hole", 100)
    assert '"num_messages": 400' in letter["headers"]


def test_a_repeat_is_known_by_outbox_and_sequence() -> None:
    a = message(group("a", [1.0]), 0, outbox="o1", sequence=1)
    b = message(group("b", [1.0]), 1, outbox="o1", sequence=3)
    other = message(group("c", [1.0]), 4, outbox="o2", sequence=1)
    assert repeats(a, b, a, b, other) == [False, False, True, True, False]


def test_a_repeat_is_known_across_calls() -> None:
    sequences: Sequences = {}
    a = message(group("a", [1.0]), 0, outbox="o1", sequence=7)
    assert repeats(a, sequences=sequences) == [False]
    assert repeats(a, sequences=sequences) == [True]


def test_a_message_without_outbox_is_never_a_repeat() -> None:
    a = message(group("a", [1.0]), 0)
    assert repeats(a, a) == [False, False]


def test_an_outbox_with_an_endless_name_is_not_remembered() -> None:
    sequences: Sequences = {}
    a = message(group("a", [1.0]), 0, outbox="o" * 257, sequence=7)
    assert (repeats(a, a, sequences=sequences), sequences) == ([False, False], {})


def test_an_unreadable_repeat_is_not_counted_twice() -> None:
    headers = ((str(Header.OUTBOX), b"o1"), (str(Header.SEQUENCE), b"4"))
    bad = dataclasses.replace(broken(0), headers=headers)
    assert len(decode(SHARD, [bad, bad], {}).dead_letters) == 1


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (b"trajectories/0/4", "trajectories/0/4"),
        (b"trajectories/0/5", None),  # itself
        (b"trajectories/1/4", None),  # another partition
        (b"weights/0/4", None),
        (b"trajectories/0/-1", None),
    ],
)
def test_a_letter_that_comes_again_names_the_one_it_was(origin: bytes, expected: str | None) -> None:
    header = (REPLAYED, origin)
    bad, good = broken(5), message(group("a", [1.0]), 5)
    bad = dataclasses.replace(bad, headers=(*bad.headers, header))
    good = dataclasses.replace(good, headers=(*good.headers, header))
    [letter] = decode(SHARD, [bad], {}).dead_letters
    assert letter.column("replayed_from").to_pylist() == [expected]
    read = [row for batch in decode(SHARD, [good], {}).dead_letters for row in batch.to_pylist()]
    assert [(r["kind"], r["replayed_from"], r["num_rows"]) for r in read] == [("replayed", expected, 0)] * bool(
        expected
    )


def test_outboxes_are_remembered_up_to_a_bound() -> None:
    sequences: Sequences = {f"o{i}": 1 for i in range(MAX_OUTBOXES)}
    repeats(message(group("a", [1.0]), 0, outbox="new", sequence=1), sequences=sequences)
    assert len(sequences) == MAX_OUTBOXES
    assert "new" in sequences
    assert "o0" not in sequences


@given(st.binary(max_size=300), st.lists(st.tuples(st.sampled_from(Header), st.binary(max_size=30)), max_size=6))
def test_no_bytes_crash_the_decoder_and_each_message_is_kept_once(
    body: bytes, headers: list[tuple[str, bytes]]
) -> None:
    raw = dataclasses.replace(broken(0), value=body, headers=tuple(headers))
    chunk = decode(SHARD, [raw], {})
    assert len(chunk.dead_letters) + len(chunk.events) == 1


def test_a_flipped_byte_never_crashes_and_never_loses_the_message() -> None:
    rng = random.Random(1)
    sound = message(group("a", [0.0, 1.0, 0.0, 1.0]), 0)
    for _ in range(300):
        body = bytearray(sound.value)
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        raw = dataclasses.replace(sound, value=bytes(body[: rng.randint(0, len(body))] if rng.random() < 0.3 else body))
        chunk = decode(SHARD, [raw], {})
        assert len(chunk.dead_letters) + len(chunk.events) == 1


def test_a_message_goes_to_the_shard_of_its_task() -> None:
    raw = message(group("a", [1.0]), 0, partitions=4)
    assert shards(raw, 4) == [SHARD]
    assert shards(dataclasses.replace(raw, headers=()), 4) == [SHARD]  # decoded for its task


@pytest.mark.parametrize("value", [b"99", b"-1", b"x", b"", b"9" * 40])
def test_a_shard_header_that_cannot_be_is_not_believed(value: bytes) -> None:
    raw = message(group("a", [1.0]), 0, partitions=4)
    assert shards(dataclasses.replace(raw, headers=((str(Header.SHARD), value),)), 4) == [SHARD]


def test_a_message_on_the_wrong_partition_goes_to_a_shard_that_this_partition_feeds() -> None:
    raw = dataclasses.replace(message(group("a", [1.0]), 0, partitions=4), lane=(SHARD + 1) % 4)
    assert shards(raw, 4) == [(SHARD + 1) % 4]


def test_weights_go_to_every_shard_of_their_lane_and_all_lanes_reach_all_shards() -> None:
    reached = [shard for lane in range(4) for shard in shards(dataclasses.replace(weights(1, 0), lane=lane), 4)]
    assert sorted(reached) == list(range(NUM_SHARDS))
    assert shards(dataclasses.replace(weights(1, 0), lane=1), 4) == [1, 5, 9, 13]


def test_an_unreadable_message_without_header_goes_to_its_lane() -> None:
    raw = dataclasses.replace(broken(0), headers=(), lane=2)
    assert shards(raw, 4) == [2]
    assert trajectory().task_id == "add/7"
