"""Transaction logs: a checkpoint where many commits came since the last one; old commits go, behind every reader."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from obstore.store import ObjectStore

from infra.lake import Lake
from infra.maintenance.compaction import open_table

CHECKPOINT_COMMITS = 100
"""Commits after a checkpoint that call for another one."""

_ENTRY = re.compile(r"_delta_log/(\d{20})\.(json|checkpoint\..*parquet)")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a log: the commit of a version, or (a part of) a checkpoint at it."""

    path: str
    version: int
    is_checkpoint: bool
    num_bytes: int
    modified_at: datetime


def checkpoint(lake: Lake, name: str, commits: int = CHECKPOINT_COMMITS) -> bool:
    """Write a checkpoint if `commits` or more have come since the last one; whether it did."""
    last, handle = lake.log(name).checkpoint(), open_table(lake, name)
    if handle.version() - (last["version"] if last else 0) < commits:
        return False
    handle.create_checkpoint()
    return True


def clean_log(lake: Lake, name: str, retention_h: float, now: datetime, cursor: int | None = None) -> int:
    """Remove commits that a checkpoint covers, that are older than `retention_h`, and that every reader has passed.

    Args:
        lake: where the table is.
        name: the table.
        retention_h: age below which a commit stays, hours.
        now: the time.
        cursor: last version that the slowest known reader has read; None if there is no such reader.

    Returns:
        Bytes removed.
    """
    store = lake.store(name)
    entries = list(_entries(store))
    last = lake.log(name).checkpoint()
    if last is None:
        return 0
    first = _first_kept(entries, last["version"], now - timedelta(hours=retention_h), cursor)
    old = sorted((e for e in entries if e.version < first), key=lambda e: (e.is_checkpoint, e.version))
    for entry in old:  # commits upward, then checkpoints: what is left is readable at any moment
        store.delete(entry.path)
    return sum(entry.num_bytes for entry in old)


def _first_kept(entries: list[Entry], newest_checkpoint: int, before: datetime, cursor: int | None) -> int:
    """The version of the newest checkpoint before which nothing is young or unread; 0 if there is none."""
    young = [e.version for e in entries if not e.is_checkpoint and e.modified_at > before]
    unread = [] if cursor is None else [cursor + 1]
    limit: int = min([newest_checkpoint, *young, *unread])
    return max((e.version for e in entries if e.is_checkpoint and e.version <= limit), default=0)


def _entries(store: ObjectStore) -> Iterator[Entry]:
    for batch in store.list("_delta_log"):
        for item in batch:
            if match := _ENTRY.fullmatch(item["path"]):
                is_checkpoint = match[2] != "json"
                yield Entry(item["path"], int(match[1]), is_checkpoint, item["size"], item["last_modified"])
