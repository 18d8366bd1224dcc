"""The live buffer: which trajectories come next."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.batches import Tokens
from trainers.buffer import LiveBuffer, Pick, Rule, gather
from trainers.fairness import Fairness
from trainers.siblings import Chunk


def chunk(rows: list[tuple[str, int, float]]) -> Chunk:
    """Rows (trajectory_id, min_weight_version, priority) with buckets of width 1; the tokens of row i are i times i.

    The group is what stands before a slash in the id: without one each row is its own group.
    """
    names, versions, priorities = zip(*rows, strict=True)
    scalars = {"trajectory_id": names, "min_weight_version": versions, "version_bucket": versions}
    scalars["group_id"] = tuple(name.partition("/")[0] for name in names)
    tokens = pa.array([[i] * i for i in range(len(rows))], pa.list_(pa.int32()))
    lists = {"token_ids": tokens, "action_mask": tokens.cast(pa.list_(pa.bool_()))}
    lists |= {"behavior_logprobs": tokens.cast(pa.list_(pa.float32()))}
    return Chunk(pa.table(scalars | {"priority": priorities}), Tokens.of(pa.table(lists)))


def filled(*chunks: list[tuple[str, int, float]], **rule: float) -> LiveBuffer:
    buffer = LiveBuffer(Rule(**rule))  # pyright: ignore[reportArgumentType]
    for version, rows in enumerate(chunks):
        buffer.add(version, chunk(rows))
    return buffer


def many(prefix: str, version: int, count: int) -> list[tuple[str, int, float]]:
    return [(f"{prefix}{i}", version, 0.0) for i in range(count)]


def names(picks: Iterable[Pick]) -> list[str]:
    return [pick.row.trajectory_id for pick in picks]


def how_often(buffer: LiveBuffer, count: int, version: int, draws: int) -> Counter[str]:
    """In how many of `draws` draws each row is, of rows that stay."""
    return Counter(name for number in range(draws) for name in names(buffer.choose(count, version, number=number)))


def test_current_bucket_comes_first_then_one_and_two_back() -> None:
    buffer = filled([("two", 3, 9.0), ("one", 4, 9.0), ("now", 5, 0.0)])
    assert names(buffer.choose(3, 5)) == ["now", "one", "two"]
    assert names(buffer.choose(2, 5)) == ["now", "one"]


def test_inside_a_bucket_groups_are_drawn_by_priority() -> None:
    # weights 0.1 + 0.01 and 0.21 + 0.01: one of two is drawn, twice as often the second; with exponent 0 alike
    rows = [("a", 5, 0.1), ("b", 5, 0.21)]
    found = how_often(filled(rows), 1, 5, 6000)
    assert found["b"] / found["a"] == pytest.approx(2, rel=0.1)
    found = how_often(filled(rows, exponent=0), 1, 5, 6000)
    assert found["b"] / found["a"] == pytest.approx(1, rel=0.1)


def test_siblings_stay_together_whatever_their_buckets_and_go_by_the_mean_priority() -> None:
    # means: a (0.9 + 0.11) / 2 = 0.505, b 0.505; the sibling that took longer comes along with the quick one
    buffer = filled([("a/0", 5, 0.9), ("b/0", 5, 0.505), ("a/1", 4, 0.11), ("b/1", 5, 0.505)])
    draws = [names(buffer.choose(2, 5, number=number)) for number in range(2000)]
    assert {tuple(sorted(draw)) for draw in draws} == {("a/0", "a/1"), ("b/0", "b/1")}
    assert sum("a/0" in draw for draw in draws) / 2000 == pytest.approx(0.5, abs=0.05)


def test_what_a_batch_leaves_of_a_group_goes_first_in_the_next() -> None:
    rows = [(f"{group}/{i}", 5, 0.5) for group in "abcd" for i in range(4)]
    buffer = filled(rows)
    first = buffer.choose(6, 5)
    buffer.use(first)
    cut = {name[0] for name in names(first)} & {row.group_id for row in buffer.rows()}
    assert len(cut) == 1
    second = buffer.choose(2, 5, number=6)
    assert {name[0] for name in names(second)} == cut
    assert {pick.probability for pick in second} == {p.probability for p in first if p.row.group_id in cut}


@pytest.mark.parametrize("trained", [{}, {0: 9.0, 3: 1.0}])
def test_the_probability_of_a_row_is_how_often_it_is_drawn(trained: dict[int, float]) -> None:
    # sums over draws of 1 / probability expect the number of draws for every row (Horvitz and Thompson 1952), also
    # where a length is owed rows: 20 of each came, 9 short ones and 1 long one were trained on, so 4 long ones are owed
    rows = [(f"t{i}", 5, 0.2 + 0.1 * i) for i in range(8)] + [(f"old{i}", 1, 0.5) for i in range(4)]
    buffer, worth = filled(rows, old_weight=0.5), defaultdict[str, float](float)
    assert {length for _, length, _ in buffer.groups().values()} == {0, 1, 2, 3, 4}
    buffer.fairness = Fairness({3: 20.0, 0: 20.0}, dict(trained))
    for number in range(4000):
        for pick in buffer.choose(7, 5, number=number):
            worth[pick.row.trajectory_id] += 1 / pick.probability
    assert {name: total / 4000 for name, total in worth.items()} == {row[0]: pytest.approx(1, abs=0.15) for row in rows}


def test_a_bucket_that_is_used_up_is_drawn_with_certainty() -> None:
    picks = filled([("now", 5, 0.3), ("one", 4, 0.2), ("too", 4, 0.2)]).choose(2, 5)
    assert picks[0].probability == 1.0
    assert 0 < picks[1].probability < 1


def test_old_buckets_get_a_small_share_so_that_they_are_not_starved() -> None:
    # weights 1 and 0.05: int(128 * 0.05 / 1.05) = 6 old ones beside 122 current ones
    buffer = filled(many("new", 9, 200) + many("old", 6, 50))
    chosen = names(buffer.choose(128, 9))
    assert sum(name.startswith("old") for name in chosen) == 6
    assert len(chosen) == 128


def test_bucket_weights_of_a_directive_multiply_by_age() -> None:
    # current 4 x 1, old 0.05: int(128 * 0.05 / 4.05) = 1
    buffer = filled(many("new", 9, 200) + many("old", 6, 50))
    chosen = names(buffer.choose(128, 9, (4.0, 1.0, 1.0)))
    assert sum(name.startswith("old") for name in chosen) == 1


def test_all_weights_zero_still_give_a_batch() -> None:
    buffer = filled(many("new", 9, 4))
    assert len(buffer.choose(4, 9, (0.0,))) == 4


def test_a_trajectory_is_used_at_most_max_uses_times() -> None:
    buffer = filled([("a", 1, 0.0)], max_uses=2)
    picks = buffer.choose(1, 1)
    buffer.use(picks)
    assert picks[0].row.uses == 1
    assert "a" in buffer
    buffer.use(picks)
    assert "a" not in buffer


def test_the_same_trajectory_is_taken_in_once() -> None:
    buffer = filled([("a", 1, 0.0)], [("a", 1, 0.0)])
    other = chunk([("a", 1, 0.0)])
    buffer.add(2, Chunk(other.rows.set_column(3, "group_id", [["other"]]), other.tokens))
    assert len(buffer) == 1
    assert list(buffer.groups()) == ["a"]
    assert names(buffer.choose(2, 1)) == ["a"]


def test_pruning_drops_what_is_older_than_the_bound() -> None:
    buffer = filled([("a", 1, 0.0), ("b", 2, 0.0), ("c", 3, 0.0)])
    assert buffer.prune(3) == 2
    assert [row.trajectory_id for row in buffer.rows()] == ["c"]


def test_payload_is_gathered_in_the_order_of_choice_over_chunks() -> None:
    buffer = filled([("a", 1, 0.1), ("b", 1, 0.9)], [("c", 1, 0.5), ("d", 1, 0.2)])
    rows = {row.trajectory_id: row for row in buffer.rows()}
    found = gather([rows["b"], rows["c"], rows["d"]])
    assert found.rows["trajectory_id"].to_pylist() == ["b", "c", "d"]
    assert found.rows["priority"].to_pylist() == [0.9, 0.5, 0.2]
    assert found.tokens.lengths.tolist() == [1, 0, 1]
    assert found.tokens.token_ids.tolist() == [1, 1]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), min_size=1, max_size=40),
    st.integers(1, 50),
    st.none() | st.lists(st.floats(0, 10), max_size=5),
)
def test_a_batch_is_as_large_as_it_can_be_and_repeats_nothing(rows: list, count: int, weights: list | None) -> None:
    buffer = filled([(f"t{i}", version, priority) for i, (version, priority) in enumerate(rows)])
    picks = buffer.choose(count, 9, weights)
    chosen = names(picks)
    assert all(0 < pick.probability <= 1 for pick in picks)
    assert len(chosen) == len(set(chosen)) == min(count, len(rows))
