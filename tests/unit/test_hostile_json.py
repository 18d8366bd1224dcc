"""Hostile JSON and hostile folders, a short form of `make fuzz`: each input is refused by name or harmless."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows import dispatch
from flows.connectors.items import Clock, Raw
from flows.steps.dispatcher import Dispatcher, State
from flows.steps.records import to_rows
from schemas.messages import Directive, decode
from schemas.settings import Settings
from schemas.topics import BUFFER, CONTROL, WEIGHTS
from tests.fuzz import checkpoints, weights
from tests.fuzz.consumers import CLASSES, RECORDED, hostile, readable
from tests.samples import T0_MS
from tests.unit.curation import Curation

seeds = st.integers(0, 2**32).map(random.Random)


def raw(topic: str, body: bytes) -> Raw:
    return Raw(topic, 0, 0, T0_MS, None, (), body)


@given(seeds, st.sampled_from([kind for kind, (topic, *_) in CLASSES.items() if topic in RECORDED]))
def test_each_message_of_a_small_topic_is_one_row_or_one_dead_letter(rng: random.Random, kind: str) -> None:
    topic, body = CLASSES[kind][0], hostile(rng, kind)
    rows = to_rows([raw(topic, body)])
    is_clock = topic == CONTROL.name and readable(kind, body) and decode(Directive, body).target == "clock"
    assert [batch.num_rows for _, batch in rows] == ([] if is_clock else [1])
    assert not rows or rows[0][0] == "dead_letters" or readable(kind, body)


@settings(deadline=None)
@given(
    st.lists(st.tuples(seeds, st.sampled_from(["shard_reports", "forks", "learner_reports", "weights", "directives"])))
)
def test_no_message_stops_the_dispatcher_or_spoils_its_state(messages: list[tuple[random.Random, str]]) -> None:
    dispatcher = Dispatcher(Settings.model_validate({"families": [{"name": "add"}], "curate": {"group_timeout_s": 5}}))
    topics = {"weights": WEIGHTS.name, "directives": CONTROL.name}
    for number, (rng, kind) in enumerate(messages):
        heard = dispatch.decode(raw(topics.get(kind, BUFFER.name), hostile(rng, kind)))
        if heard is not None and not isinstance(heard[1], Clock):
            dispatcher.hear(heard[1])
        dispatcher.tick(T0_MS + number * 1000)
        dispatcher.rows()
    assert State.from_bytes(dispatcher.end_epoch()).now_ms == dispatcher.state.now_ms


@given(st.lists(st.tuples(seeds, st.sampled_from(["weights", "directives"]))))
def test_no_note_stops_a_shard(notes: list[tuple[random.Random, str]]) -> None:
    curation = Curation()
    for rng, kind in notes:
        curation.feed(raw(CLASSES[kind][0], hostile(rng, kind)))
    curation.restart()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate_scale", "1e9"),
        ("learning_rate_scale", "NaN"),
        ("learning_rate_scale", "-1"),
        ("family_weights", '{"add": -1}'),
        ("family_weights", '{"add": NaN}'),
        ("bucket_weights", "[1, -0.5]"),
        ("bucket_weights", "[Infinity]"),
        ("min_weight_version", "-1"),
        ("min_weight_version", str(2**70)),
        ("pause", '"for ever"'),
    ],
)
def test_a_directive_with_a_value_out_of_range_is_a_dead_letter_that_names_the_field(field: str, value: str) -> None:
    body = f'{{"directive_id": "d", "target": "all", "issued_by": "x", "issued_at": "2026-01-01T00:00:00Z", "{field}": '
    [(table, batch)] = to_rows([raw(CONTROL.name, f"{body}{value}}}".encode())])
    assert table == "dead_letters"
    assert field in batch.to_pylist()[0]["error"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fuzz", "count"), [(weights.fuzz, 4 * len(weights.CLASSES)), (checkpoints.fuzz, 8 * len(checkpoints.CLASSES))]
)
def test_hostile_folders_are_refused_by_name_and_change_nothing_outside(fuzz, count: int) -> None:
    assert fuzz(count, seed=5).problems() == []
