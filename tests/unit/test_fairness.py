"""What is trained on has the lengths of what comes, also where long episodes come late."""

import random
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pytest

from trainers.batches import Tokens
from trainers.buffer import LiveBuffer, Rule
from trainers.fairness import MEMORY, Fairness, Lengths, length_class, owed
from trainers.siblings import Chunk

GROUP, BATCH, MAX_STALENESS = 4, 16, 3
SHORT, LONG = 3, 40


def test_lengths_of_a_class_differ_by_less_than_a_factor_of_two() -> None:
    assert [length_class(n) for n in (0, 1, 2, 3, 3.9, 4, 7, 8)] == [0, 1, 2, 2, 2, 3, 3, 4]


def test_a_length_is_owed_its_share_of_what_was_trained_less_what_it_had() -> None:
    # 80 short and 20 long ones came, 50 short ones were trained on: of 50, 40 should be short and 10 long
    assert owed({2: 80, 6: 20}, {2: 50}) == {6: 10}
    assert owed({2: 80, 6: 20}, {2: 40, 6: 10}) == {}
    assert owed({2: 80, 6: 20}, {}) == {}
    assert owed({}, {}) == {}


def test_counts_fade_from_batch_to_batch() -> None:
    fairness = Fairness()
    fairness.note_come({2: 10})
    fairness.note_trained({2: 4})
    fairness.note_trained({3: 5})
    assert fairness.come == pytest.approx({2: 10 * MEMORY**2, 3: 0.0})
    assert fairness.trained == pytest.approx({2: 4 * MEMORY, 3: 5.0})


def test_lengths_in_the_ledger_are_told_apart_by_what_became_of_the_trajectory() -> None:
    # produced: 10, 20 and 60, mean 30; dropped: 60 and 20, mean 40; without a signal there is nothing to lose
    events = [("admitted", 10), ("admitted", 20), ("stale", 60), ("no_signal", 900), ("duplicate", 900)]
    lengths = Lengths()
    for part in (events, [("evicted", 20)]):
        names, tokens = zip(*part, strict=True)
        lengths.note(pa.table({"event": names, "num_generated_tokens": tokens}))
    assert lengths.take() == {"produced_length": 30.0, "dropped_length": 40.0}
    assert lengths.take() == {}


def lived(seed: int) -> tuple[Counter[int], Counter[int]]:
    """Trajectories by length that came and that were trained on, where production is twice what can be trained on.

    A group's prompt goes out at weight version v; a short one comes at v, a long one, one in four, two versions later.
    """
    draw = random.Random(seed)
    buffer, come, trained = LiveBuffer(Rule(group_size=GROUP)), Counter[int](), Counter[int]()
    under_way: dict[int, list[tuple[str, int, int]]] = {}
    for version in range(60):
        for number in range(2 * BATCH // GROUP):
            late, length = (2, LONG) if draw.random() < 0.25 else (0, SHORT)
            under_way.setdefault(version + late, []).append((f"{version}-{number}", version, length))
        arrived = under_way.pop(version)
        buffer.add(version, _chunk(arrived, draw))
        come.update(length for _, _, length in arrived for _ in range(GROUP))
        buffer.prune(version - MAX_STALENESS)
        picks = buffer.choose(BATCH, version, number=version)
        assert all(version - pick.row.min_weight_version <= MAX_STALENESS for pick in picks)
        trained.update(pick.row.num_tokens - 1 for pick in picks)
        buffer.use(picks)
    return come, trained


def _chunk(groups: list[tuple[str, int, int]], draw: random.Random) -> Chunk:
    members = list(_members(groups, draw))
    names = ("trajectory_id", "group_id", "min_weight_version", "version_bucket", "priority")
    rows = pa.table(dict(zip(names, zip(*(cells for cells, _ in members), strict=True), strict=True)))
    masks = [[False] + [True] * length for _, length in members]
    lists = {"token_ids": pa.array([[1] * len(m) for m in masks], pa.list_(pa.int32()))}
    lists |= {"action_mask": pa.array(masks), "behavior_logprobs": pa.array([[0.0] * len(m) for m in masks])}
    lists["behavior_logprobs"] = lists["behavior_logprobs"].cast(pa.list_(pa.float32()))
    return Chunk(rows, Tokens.of(pa.table(lists)))


def _members(groups: list[tuple[str, int, int]], draw: random.Random) -> Iterator[tuple[tuple[object, ...], int]]:
    for group, version, length in groups:
        for i in range(GROUP):
            yield (f"{group}/{i}", group, version, version, draw.random()), length


def _share_of_long(counts: Counter[int]) -> float:
    return counts[LONG] / counts.total()


def test_long_episodes_that_come_late_are_trained_as_often_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    come, trained = lived(0)
    assert _share_of_long(come) == pytest.approx(0.25, abs=0.05)
    assert _share_of_long(trained) == pytest.approx(_share_of_long(come), abs=0.05)
    monkeypatch.setattr("trainers.fairness.owed", lambda come, trained: {})  # without the rule: newest bucket first
    assert _share_of_long(lived(0)[1]) < 0.5 * _share_of_long(come)
