"""The live buffer: which trajectories come next."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from trainers.batches import Tokens
from trainers.buffer import Chunk, LiveBuffer, gather


def chunk(rows: list[tuple[str, int, float]]) -> Chunk:
    """Rows (trajectory_id, min_weight_version, priority) with buckets of width 1; the tokens of row i are i times i.

    The group is what stands before a slash in the id: without one each row is its own group.
    """
    names, versions, priorities = zip(*rows, strict=True)
    scalars = {"trajectory_id": names, "min_weight_version": versions, "version_bucket": versions}
    scalars["group_id"] = [name.partition("/")[0] for name in names]
    tokens = pa.array([[i] * i for i in range(len(rows))], pa.list_(pa.int32()))
    lists = {"token_ids": tokens, "action_mask": tokens.cast(pa.list_(pa.bool_()))}
    lists |= {"behavior_logprobs": tokens.cast(pa.list_(pa.float32()))}
    return Chunk(pa.table(scalars | {"priority": priorities}), Tokens.of(pa.table(lists)))


def filled(*groups: list[tuple[str, int, float]], max_uses: int = 1, old_weight: float = 0.05) -> LiveBuffer:
    buffer = LiveBuffer(1, max_uses, old_weight)
    for version, rows in enumerate(groups):
        buffer.add(version, chunk(rows))
    return buffer


def many(prefix: str, version: int, count: int) -> list[tuple[str, int, float]]:
    return [(f"{prefix}{i}", version, 0.0) for i in range(count)]


def names(rows: list) -> list[str]:
    return [row.trajectory_id for row in rows]


def test_current_bucket_comes_first_then_one_and_two_back() -> None:
    buffer = filled([("two", 3, 9.0), ("one", 4, 9.0), ("now", 5, 0.0)])
    assert names(buffer.choose(3, 5)) == ["now", "one", "two"]
    assert names(buffer.choose(2, 5)) == ["now", "one"]


def test_inside_a_bucket_priority_counts_then_arrival() -> None:
    buffer = filled([("a", 5, 0.1), ("b", 5, 0.7), ("c", 5, 0.1)], [("d", 5, 0.7)])
    assert names(buffer.choose(4, 5)) == ["b", "d", "a", "c"]


def test_siblings_stay_together_and_rank_by_their_mean() -> None:
    # means: a (0.9 + 0.1) / 2 = 0.5, b (0.6 + 0.6) / 2 = 0.6
    buffer = filled([("a/0", 5, 0.9), ("b/0", 5, 0.6), ("a/1", 5, 0.1), ("b/1", 5, 0.6)])
    assert names(buffer.choose(4, 5)) == ["b/0", "b/1", "a/0", "a/1"]


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
    rows = buffer.choose(1, 1)
    buffer.use(rows)
    assert rows[0].uses == 1
    assert "a" in buffer
    buffer.use(rows)
    assert "a" not in buffer


def test_the_same_trajectory_is_taken_in_once() -> None:
    buffer = filled([("a", 1, 0.0)], [("a", 1, 0.0)])
    assert len(buffer) == 1


def test_pruning_drops_what_is_older_than_the_bound() -> None:
    buffer = filled([("a", 1, 0.0), ("b", 2, 0.0), ("c", 3, 0.0)])
    assert buffer.prune(3) == 2
    assert names(buffer.rows()) == ["c"]


def test_payload_is_gathered_in_the_order_of_choice_over_chunks() -> None:
    buffer = filled([("a", 1, 0.1), ("b", 1, 0.9)], [("c", 1, 0.5), ("d", 1, 0.2)])
    chosen = buffer.choose(3, 1)
    assert names(chosen) == ["b", "c", "d"]
    found = gather(chosen)
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
    chosen = names(buffer.choose(count, 9, weights))
    assert len(chosen) == len(set(chosen)) == min(count, len(rows))
