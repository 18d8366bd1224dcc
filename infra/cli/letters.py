"""Dead letters into the log once more: those that an SQL condition names, byte for byte."""

import json
from typing import Any

import duckdb

from infra import sql
from infra.cli import tables
from infra.kafka import Producer
from infra.lake import Lake
from schemas.errors import LakeError
from schemas.names import Header
from schemas.replay import REPLAYED, origin
from schemas.settings import Settings
from schemas.topics import TRAJECTORIES

MAX_LETTERS = 1000
"""Most letters of one call. Each counts as an outbox of its own, and curation remembers a few thousand of those."""

_OWN = {Header.OUTBOX, Header.SEQUENCE, REPLAYED}
_COLUMNS = ("partition", '"offset"', "key", "value", "headers", "error", "num_rows", "num_tokens")

Letter = dict[str, Any]


def replay(settings: Settings, where: str, dry_run: bool) -> int:
    """Show the letters that `where` names, and send them unless it is a dry run."""
    letters = _select(Lake.of(settings), settings.run.in_this_life(TRAJECTORIES.name), where)
    if not letters:
        raise LakeError(f"no dead letter of {TRAJECTORIES.name} that was not sent again fulfils: {where}")
    more, letters = len(letters) > MAX_LETTERS, letters[:MAX_LETTERS]
    if not dry_run:
        _send(settings, letters)
    tables.show(
        _summary(letters), f"{len(letters)} letters {'would be ' if dry_run else ''}sent to {TRAJECTORIES.name}"
    )
    if more:
        tables.show(
            f"There are more; run it again {'without --dry-run ' if dry_run else ''}once curate has read these."
        )
    return 0


def _select(lake: Lake, topic: str, where: str) -> list[Letter]:
    query = f"""SELECT {", ".join(_COLUMNS)} FROM letters WHERE topic = '{topic}' AND ({where}
        ) ORDER BY partition, "offset" LIMIT {MAX_LETTERS + 1}"""  # noqa: S608 - the operator's own SQL, on a copy
    with sql.connect(lake) as connection:
        try:
            rows = connection.execute(query).fetchall()
        except duckdb.Error as error:
            raise LakeError(f"the condition cannot be answered: {error}") from error
    return [dict(zip((name.strip('"') for name in _COLUMNS), row, strict=True)) for row in rows]


def _send(settings: Settings, letters: list[Letter]) -> None:
    """Send `letters` to the partitions that they came from.

    An outbox of its own for each makes a second send a redelivery, which the curate flow counts once.
    """
    producer = Producer(settings.kafka, "lagoon-replay")
    for letter in letters:
        producer.send(
            TRAJECTORIES.name,
            (letter["key"] or b"").decode(errors="replace"),
            letter["value"] or b"",
            headers=_headers(letter),
            partition=letter["partition"],
        )
    producer.flush(settings.kafka.timeout_s)
    producer.close()


def _headers(letter: Letter) -> dict[str, bytes]:
    name = origin(letter["partition"], letter["offset"]).encode()
    kept = {key: bytes.fromhex(value) for key, value in json.loads(letter["headers"]) if key not in _OWN}
    return kept | {REPLAYED: name, Header.OUTBOX: b"replay/" + name, Header.SEQUENCE: b"1"}


def _summary(letters: list[Letter]) -> Any:
    by_error: dict[str, list[Letter]] = {}
    for letter in letters:
        by_error.setdefault(letter["error"], []).append(letter)
    rows = [
        [error[:120], *(f"{n:,}" for n in (len(some), _total(some, "num_rows"), _total(some, "num_tokens")))]
        for error, some in sorted(by_error.items())
    ]
    return tables.table(["error", "letters", "trajectories", "tokens"], rows)


def _total(letters: list[Letter], column: str) -> int:
    return sum(letter[column] for letter in letters)
