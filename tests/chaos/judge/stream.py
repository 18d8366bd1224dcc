"""Judge of a stream: the journal of what was made against the lake."""

from collections import Counter
from pathlib import Path

import pyarrow as pa

from infra import sql
from infra.lake import Lake
from schemas.settings import Settings
from schemas.tables import USAGE
from tests.chaos import record
from tests.chaos.judge.tables import Tables
from tests.chaos.record import Entry, Fate
from tests.chaos.verdict import Verdict
from tests.samples import NOON


def judge_stream(settings: Settings, journal: Path) -> Verdict:
    """Whether each trajectory of `journal` came to its fate and to no other, once everything has come to rest."""
    entries, tables, verdict = list(record.read(journal)), Tables(settings), Verdict()
    _check_outcomes(entries, tables, verdict)
    _check_letters(entries, tables, verdict)
    _check_experience(entries, tables, verdict)
    _check_groups(entries, tables, verdict)
    _check_books(entries, Lake.of(settings), verdict)
    return verdict


def accounted(settings: Settings) -> int:
    """Trajectories that have an outcome or lie in dead letters; an outcome that is there twice counts once."""
    tables = Tables(settings)
    return len(set(tables.outcomes())) + sum(rows for rows, _ in tables.letters().values())


def _check_outcomes(entries: list[Entry], tables: Tables, verdict: Verdict) -> None:
    """One outcome each. Another one than expected is unexplained; none is lost; a further one is a duplicate."""
    readable = [e for e in entries if e.fate != Fate.DEAD_LETTER]
    found = tables.outcomes()
    expected_number = Counter(e.trajectory_id for e in readable)
    found_number = Counter(name for name, *_ in found)
    verdict.compare("outcome of trajectory", expected_number, found_number)
    right = {name for name, count in expected_number.items() if found_number[name] == count}
    expected = Counter((e.trajectory_id, str(e.fate), e.group_id, e.tokens) for e in readable)
    other = Counter(row for row in found if row[0] in right) - expected
    for name, outcome, group, tokens in sorted(other):
        fates = "/".join(sorted(e.fate for e in readable if e.trajectory_id == name))
        verdict.question(f"trajectory {name} is {outcome} in group {group} with {tokens} tokens; expected {fates}")


def _check_letters(entries: list[Entry], tables: Tables, verdict: Verdict) -> None:
    dead = [e for e in entries if e.fate == Fate.DEAD_LETTER]
    letters = tables.letters()
    expected = Counter(e.group_id for e in dead)
    verdict.compare("dead letters of group", expected, Counter({key: rows for key, (rows, _) in letters.items()}))
    tokens = Counter[str]()
    for entry in dead:
        tokens[entry.group_id] += entry.tokens
    for group in expected.keys() & letters.keys():
        counted = letters[group][1]
        verdict.expect(counted == tokens[group], f"dead letters of {group} count {counted} tokens, not {tokens[group]}")
    verdict.expect(not tables.holes(), f"{tables.holes()} ranges of offsets expired unread")


def _check_experience(entries: list[Entry], tables: Tables, verdict: Verdict) -> None:
    """What was admitted can be trained on: one row each, with all its tokens. What has no outcome was missed above."""
    known = {name for name, *_ in tables.outcomes()}
    expected = Counter(
        (e.trajectory_id, e.tokens) for e in entries if e.fate == Fate.ADMITTED and e.trajectory_id in known
    )
    verdict.compare("experience of (trajectory, tokens)", expected, Counter(tables.experience()))


def _check_groups(entries: list[Entry], tables: Tables, verdict: Verdict) -> None:
    """Each group that has outcomes is closed once."""
    known = {group for _, _, group, _ in tables.outcomes()}
    expected = Counter({e.group_id: 1 for e in entries if e.group_id in known})
    verdict.compare("closing of group", expected, Counter(tables.closings()))


def _check_books(entries: list[Entry], lake: Lake, verdict: Verdict) -> None:
    """Lagoon's own view has to come to the same result, where the journal says what was produced."""
    sums = {"trajectories": len(entries), "tokens": sum(e.tokens for e in entries)}
    with sql.connect(lake) as connection:
        connection.register("usage", _usage(sums))
        rows = connection.sql("select * from conservation")
        columns = rows.columns
        books = {row[0]: dict(zip(columns, row, strict=True)) for row in rows.fetchall()}
    for kind, produced in sums.items():
        book = books.get(kind, {})
        settled = book.get("balanced") and book["in_flight"] == 0 and book["produced"] == produced
        verdict.expect(bool(settled), f"view `conservation` does not balance in {kind}: {book}; produced {produced}")


def _usage(sums: dict[str, int]) -> pa.Table:
    row = {"outbox": "journal", "started_at": NOON, "ended_at": NOON, "interval_id": "journal"}
    row |= {f"produced_{kind}": produced for kind, produced in sums.items()}
    return pa.Table.from_pylist([row], USAGE.delta_schema)
