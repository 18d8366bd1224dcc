"""Retention of claimed objects: they go when no message in Kafka, and no dead letter, can name them any more."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from infra import sql
from infra.claims import Claims
from infra.lake import Lake
from schemas.claims import Claim
from schemas.errors import ContractError
from schemas.messages import decode
from schemas.names import Header
from schemas.topics import TRAJECTORIES

SLACK = timedelta(days=8)
"""Kafka removes whole segments, so a message may outlive the topic's retention by as long as a segment is written to
(`segment.ms`, seven days); and an object is up to an hour older than the message that names it."""

_NAMED = f"""
SELECT letter.value FROM dead_letters AS letter LEFT JOIN dead_letters AS again
    ON again.replayed_from = letter.topic || '/' || letter.partition || '/' || letter."offset"
WHERE letter.kind = 'undecodable' AND letter.topic = '{TRAJECTORIES.name}'
    AND letter.headers LIKE '%"{Header.CLAIM}"%' AND (again."at" IS NULL OR again."at" >= ?)
"""  # noqa: S608 - constants


def remove_claims(claims: Claims, lake: Lake, retention_h: float, now: datetime) -> tuple[int, int]:
    """Remove objects that only messages name which Kafka has removed.

    Rows that came of them are in the lake by then, for a group closes within a tenth of the retention. What a dead
    letter names stays until the letter was sent again, and that message has expired too.

    Args:
        claims: the store.
        lake: its dead letters.
        retention_h: hours for which Kafka keeps messages.
        now: the time.

    Returns:
        Objects removed, and their bytes.
    """
    before = now - timedelta(hours=retention_h) - SLACK
    old = list(_older(claims, before))
    named = _named(lake, before) if old else set[str]()
    num_bytes = [claims.remove(name, before) for name in old if name not in named]
    return sum(size > 0 for size in num_bytes), sum(num_bytes)


def _older(claims: Claims, before: datetime) -> Iterator[str]:
    for batch in claims.store.list():
        for item in batch:
            if item["last_modified"] < before:
                yield item["path"]


def _named(lake: Lake, since: datetime) -> set[str]:
    with sql.connect(lake) as connection:
        rows = connection.execute(_NAMED, [since]).fetchall()
    found: set[str] = set()
    for (value,) in rows:
        try:
            found.add(decode(Claim, value).sha256)
        except ContractError:
            continue  # the letter lies there because it names nothing
    return found
