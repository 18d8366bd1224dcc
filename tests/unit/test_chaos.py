"""The chaos suite's own parts: its record, its table, and the certainty of what it makes."""

from pathlib import Path

from inference.outbox import Outbox
from tests.chaos.making import FIRST_VERSION, KINDS, make
from tests.chaos.record import Entry, Fate, Journal, read
from tests.chaos.table import Row, merge, passed, render

ONE = Entry("t1", "g1", 0, 6, Fate.ADMITTED, 0, "admitted", 11)
TWO = Entry("t2", "g1", 1, 7, Fate.STALE, 0, "partly_stale", 11)


def test_a_torn_last_line_is_no_entry_and_is_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path).append([ONE, TWO])
    path.write_bytes(path.read_bytes()[:-5])
    assert list(read(path)) == [ONE]
    journal = Journal(path)
    assert journal.entries == [ONE]
    journal.append([TWO])
    assert list(read(path)) == [ONE, TWO]


def test_a_group_made_again_is_the_same_to_the_byte(tmp_path: Path) -> None:
    for kind in KINDS:
        bodies = []
        for life in ("a", "b"):
            outbox = Outbox(tmp_path / kind / life, 1 << 20)
            made = make(7, kind, 3, FIRST_VERSION)
            bodies.append(outbox.message(outbox.pack([outbox.append(t) for t, _ in made], 0))[0])
        assert bodies[0] == bodies[1]


def test_rows_of_one_victim_are_one_row_and_the_total_counts_all() -> None:
    rows = merge(
        [Row("curate", 2, recoveries_s=[1.0, 3.0]), Row("broker", 1, lost=1), Row("curate", 1, recoveries_s=[2.0])]
    )
    assert rows == [Row("curate", 3, recoveries_s=[1.0, 3.0, 2.0]), Row("broker", 1, lost=1)]
    lines = render(rows).splitlines()
    assert lines[2].split() == ["curate", "3", "0", "0", "0", "2.0", "s", "3.0", "s"]
    assert lines[-1].split() == ["total", "4", "1", "0", "0", "2.0", "s", "3.0", "s"]


def test_any_loss_repeat_or_riddle_fails_the_table() -> None:
    assert passed([Row("curate", 5)])
    assert not any(
        passed([Row("a"), row]) for row in (Row("b", lost=1), Row("b", duplicated=1), Row("b", unexplained=1))
    )
