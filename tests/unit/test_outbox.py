"""The outbox: what is appended is sent once it is possible, under the same numbers, whatever is killed."""

import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.outbox import Outbox
from inference.segments import SegmentLog
from schemas import wire
from schemas.errors import LagoonError
from schemas.names import Header
from schemas.trajectory import from_batch
from tests.rollout_fakes import episode, task

MAX_BYTES = 1024 * 1024


def _log_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


def test_a_message_made_again_after_a_restart_is_the_same_message(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, MAX_BYTES)
    sent = [episode(task(), i) for i in range(3)]
    pack = outbox.pack([outbox.append(e) for e in sent], partition=2)
    body, headers = outbox.message(pack)
    outbox.close()

    again = Outbox(tmp_path, MAX_BYTES)
    pack_again = again.oldest(2)
    assert pack_again is not None
    assert again.message(pack_again) == (body, headers)
    assert from_batch(wire.decode(body)) == sent
    assert headers[Header.OUTBOX] == again.id.encode()
    assert headers[Header.SEQUENCE] == b"1"
    assert headers[Header.NUM_ROWS] == b"3"
    assert headers[Header.NUM_TOKENS] == b"9"


def test_a_message_has_the_headers_and_rows_of_wire_pack(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, MAX_BYTES)
    sent = [episode(task(), i) for i in range(2)]
    body, headers = outbox.message(outbox.pack([outbox.append(e) for e in sent], 0))
    expected_body, expected_headers = wire.pack(sent)
    assert wire.decode(body) == wire.decode(expected_body)
    assert {k: v for k, v in headers.items() if k in expected_headers} == expected_headers


def test_totals_count_every_episode_once_over_all_lives_and_after_files_are_dropped(tmp_path: Path) -> None:
    outbox_id = ""
    for life in range(1, 4):
        outbox = Outbox(tmp_path, 32 * 1024)
        outbox_id = outbox_id or outbox.id
        for number in range(20):
            pack = outbox.pack([outbox.append(episode(task(number), num_tokens=5))], 0)
            outbox.acknowledge(pack)
        assert (outbox.id, outbox.num_trajectories, outbox.num_tokens) == (outbox_id, 20 * life, 100 * life)
        assert outbox.is_empty
        assert len(_log_files(tmp_path)) <= 2
        outbox.close()


def test_sequences_increase_per_partition_and_are_never_used_twice(tmp_path: Path) -> None:
    seen: set[tuple[int, int]] = set()
    for _ in range(3):
        outbox = Outbox(tmp_path, 16 * 1024)
        for number in range(10):
            pack = outbox.pack([outbox.append(episode(task(number)))], number % 2)
            assert (pack.partition, pack.sequence) not in seen
            seen.add((pack.partition, pack.sequence))
            outbox.acknowledge(pack)
        outbox.close()
    assert seen == {(p, s) for p in (0, 1) for s in range(1, 16)}


def test_acknowledged_packs_do_not_come_back(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, MAX_BYTES)
    first = outbox.pack([outbox.append(episode(task(1)))], 0)
    second = outbox.pack([outbox.append(episode(task(2)))], 0)
    outbox.acknowledge(first)
    outbox.close()
    again = Outbox(tmp_path, MAX_BYTES)
    assert [again.oldest(0)] == [second]
    assert again.loose == []


def test_an_episode_that_was_not_packed_is_still_there_after_a_restart(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, MAX_BYTES)
    kept = outbox.append(episode(task()))
    outbox.close()
    assert Outbox(tmp_path, MAX_BYTES).loose == [kept]


def test_a_full_outbox_is_full_until_kafka_takes_some(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, 20_000)
    packs = []
    while not outbox.is_full:
        packs.append(outbox.pack([outbox.append(episode(task(len(packs))))], 0))
    assert outbox.num_bytes >= 20_000
    for pack in packs:
        outbox.acknowledge(pack)
    assert not outbox.is_full
    assert outbox.is_empty


def test_two_processes_cannot_hold_one_outbox(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, MAX_BYTES)
    with pytest.raises(LagoonError, match="held by another process"):
        Outbox(tmp_path, MAX_BYTES)
    outbox.close()
    Outbox(tmp_path, MAX_BYTES).close()


def test_a_flipped_byte_is_set_aside_and_named_and_no_sequence_is_used_again(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, MAX_BYTES)
    whole = outbox.append(episode(task(1)))
    outbox.pack([outbox.append(episode(task(2)))], 0)
    outbox.close()
    path = _log_files(tmp_path)[0]
    body = bytearray(path.read_bytes())
    body[whole.place.offset + whole.place.num_bytes + 40] ^= 1  # in the second episode
    path.write_bytes(body)

    again = Outbox(tmp_path, MAX_BYTES)
    assert again.loose == [whole]
    assert (again.num_trajectories, len(again.damage)) == (1, 1)
    assert "kept as 00000001.corrupt-" in again.damage[0]
    assert list(tmp_path.glob("*.corrupt-*"))
    assert again.pack([whole], 0).sequence == 1_000_001  # 1 was sent, perhaps, with other content
    again.acknowledge(again.packs(0)[0])
    again.close()
    once_more = Outbox(tmp_path, MAX_BYTES)
    assert once_more.damage == []
    assert once_more.pack([once_more.append(episode(task(3)))], 1).sequence == 1_000_001


@pytest.mark.parametrize("cut", ["roll", "set_aside"])
def test_no_sequence_is_used_again_where_the_start_after_damage_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    outbox = Outbox(tmp_path / "first", MAX_BYTES)
    outbox.pack([outbox.append(episode(task(1)))], 0)  # sent, perhaps
    outbox.close()
    path = _log_files(outbox.folder)[0]
    path.write_bytes(path.read_bytes()[:-1])

    def no_room(log: SegmentLog) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(SegmentLog, cut, no_room)
        with pytest.raises(OSError, match="No space left"):
            Outbox(outbox.folder, MAX_BYTES)
    shutil.copytree(outbox.folder, tmp_path / "again")  # the first is locked as long as its process lives
    again = Outbox(tmp_path / "again", MAX_BYTES)
    assert len(again.damage) == 1
    assert again.pack(again.loose, 0).sequence > 1_000_000
    again.close()
    assert Outbox(again.folder, MAX_BYTES).damage == []


def test_damage_in_an_older_file_leaves_the_totals_of_later_ones_right(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, 16 * 1024)
    kept = [outbox.append(episode(task(n))) for n in range(10)]
    outbox.close()
    first, *_, last = _log_files(tmp_path)
    assert first != last
    first.write_bytes(first.read_bytes()[:-10])

    again = Outbox(tmp_path, 16 * 1024)
    assert again.num_trajectories == 10
    assert len(again.loose) == 9
    assert len(again.damage) == 1
    assert kept[-1] in again.loose


def test_a_pack_that_lost_a_member_is_packed_anew(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, 16 * 1024)
    kept = [outbox.append(episode(task(), n)) for n in range(8)]
    assert kept[0].place.segment != kept[-1].place.segment
    outbox.pack(kept, 0)
    outbox.close()
    first = _log_files(tmp_path)[0]
    first.write_bytes(first.read_bytes()[:-10])

    again = Outbox(tmp_path, 16 * 1024)
    assert again.oldest(0) is None
    assert len(again.loose) == 7
    assert again.pack(again.loose, 0).sequence == 1_000_002


@settings(max_examples=60)
@given(data=st.data())
def test_a_crash_at_any_byte_keeps_a_prefix_with_right_totals(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outbox = Outbox(folder, 24 * 1024)
        ends = [0]  # bytes after each append, over all files
        appended: list[str] = []
        for number in range(data.draw(st.integers(1, 12), label="episodes")):
            kept = outbox.append(episode(task(number)))
            appended.append(kept.group_id)
            ends.append(outbox.num_bytes)
            if data.draw(st.booleans(), label="packed"):
                outbox.pack([kept], 0)
        outbox.close()
        size = outbox.num_bytes
        cut = data.draw(st.integers(0, size), label="bytes that survive")
        _cut(folder, size - cut)

        again = Outbox(folder, 24 * 1024)
        survivors = sum(end <= cut for end in ends[1:])
        assert again.num_trajectories == survivors
        assert again.num_tokens == 3 * survivors
        found = again.loose + [e for pack in again.packs(0) for e in pack.episodes]
        assert sorted(e.number for e in found) == list(range(1, survivors + 1))
        assert {e.group_id for e in found} == set(appended[:survivors])
        again.close()


def _cut(folder: Path, num_bytes: int) -> None:
    """Cut bytes off the end of the log, as a crash does."""
    for path in reversed(_log_files(folder)):
        size = path.stat().st_size
        if num_bytes >= size:
            path.unlink()
            num_bytes -= size
        else:
            path.write_bytes(path.read_bytes()[: size - num_bytes])
            return


def test_a_copy_of_the_folder_is_readable_at_any_time(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "live", MAX_BYTES)
    outbox.pack([outbox.append(episode(task()))], 0)
    shutil.copytree(tmp_path / "live", tmp_path / "copy")  # what kill -9 leaves: nothing was closed
    copy = Outbox(tmp_path / "copy", MAX_BYTES)
    assert (copy.num_trajectories, copy.oldest(0)) == (1, outbox.oldest(0))
