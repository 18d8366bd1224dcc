"""Which finished episodes travel together."""

from hypothesis import given
from hypothesis import strategies as st

from inference.outbox import Episode
from inference.packs import Packer, fitting
from inference.segments import Place


def _episode(number: int, group: str = "a") -> Episode:
    return Episode(number, group, "add/0", 3, Place(1, 0, 1))


def test_a_group_leaves_as_soon_as_its_last_member_here_is_done() -> None:
    packer = Packer(linger_s=60)
    packer.started("a", 2)
    packer.finished(_episode(1), now=0)
    assert packer.take(now=1) == []
    packer.finished(_episode(2), now=1)
    assert packer.take(now=1) == [[_episode(1), _episode(2)]]
    assert packer.take(now=100) == []


def test_a_slow_member_holds_its_siblings_up_for_the_linger_time_only() -> None:
    packer = Packer(linger_s=0.5)
    packer.started("a", 3)
    packer.finished(_episode(1), now=10.0)
    packer.finished(_episode(2), now=10.3)
    assert packer.take(now=10.49) == []
    assert packer.take(now=10.5) == [[_episode(1), _episode(2)]]
    packer.finished(_episode(3), now=11)
    assert packer.take(now=11) == [[_episode(3)]]


def test_a_pack_holds_one_group_and_at_most_sixteen_members() -> None:
    packer = Packer(linger_s=60)
    packer.started("a", 20)
    packer.started("b", 1)
    for number in range(1, 21):
        packer.finished(_episode(number), now=0)
    packer.finished(_episode(21, "b"), now=0)
    assert [[e.number for e in pack] for pack in packer.take(now=0)] == [list(range(1, 17)), [17, 18, 19, 20], [21]]


def test_a_group_issued_again_to_the_same_service_waits_for_both_issues() -> None:
    packer = Packer(linger_s=60)
    packer.started("a", 1)
    packer.started("a", 1)
    packer.finished(_episode(1), now=0)
    assert packer.take(now=0) == []
    packer.finished(_episode(2), now=0)
    assert packer.take(now=0) == [[_episode(1), _episode(2)]]


def test_episodes_of_an_earlier_life_leave_at_once() -> None:
    packer = Packer(linger_s=60)
    packer.add([_episode(1), _episode(2, "b")], now=0)
    assert packer.take(now=0) == [[_episode(1)], [_episode(2, "b")]]


def test_force_takes_everything() -> None:
    packer = Packer(linger_s=60)
    packer.started("a", 5)
    packer.finished(_episode(1), now=0)
    assert packer.take(now=0, force=True) == [[_episode(1)]]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1)), max_size=60))
def test_every_episode_leaves_in_exactly_one_pack(events: list[tuple[str, float]]) -> None:
    packer, now, packs = Packer(linger_s=0.5), 0.0, []
    for group in "abc":
        packer.started(group, sum(g == group for g, _ in events) + 1)  # one member of each never ends
    for number, (group, delay) in enumerate(events):
        now += delay
        packer.finished(_episode(number, group), now)
        packs += packer.take(now)
    packs += packer.take(now + 0.5)
    assert sorted(e.number for pack in packs for e in pack) == list(range(len(events)))
    assert all(1 <= len(pack) <= 16 and len({e.group_id for e in pack}) == 1 for pack in packs)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=16), st.integers(1, 60))
def test_parts_hold_the_same_episodes_in_order_and_only_a_single_one_is_too_large(
    sizes: list[int], max_bytes: int
) -> None:
    episodes = [Episode(n, "a", "add/0", 3, Place(1, 0, size)) for n, size in enumerate(sizes)]
    parts = fitting(episodes, max_bytes)
    assert [e for part in parts for e in part] == episodes
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        size = sum(e.place.num_bytes for e in part)
        assert size <= max_bytes or len(part) == 1
        assert after is None or size + after[0].place.num_bytes > max_bytes  # no part could have been larger
