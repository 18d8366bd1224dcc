"""Vacuum: data files that no version needs any more, and files that no commit ever named."""

from urllib.parse import unquote

from infra.lake import Lake
from infra.maintenance.compaction import open_table


def vacuum(lake: Lake, name: str, retention_h: int) -> int:
    """Remove files that were rewritten, or written and never committed, at least `retention_h` hours ago.

    A staged file looks like an orphan until its commit. A flow that stood still commits, when it goes on, what it had
    staged before, so the retention must exceed the longest standstill; `schemas.settings` sees to that. What a reader
    has still to read must be younger: `infra.maintenance.readers.unread_h` is to be added.

    Returns:
        Bytes removed.
    """
    handle = open_table(lake, name)
    old = handle.vacuum(retention_h, dry_run=True, enforce_retention_duration=False, full=True)
    if not old:
        return 0  # a vacuum leaves two commits even where it removes nothing
    num_bytes = sum(_size(lake, name, path) for path in old)
    handle.vacuum(retention_h, dry_run=False, enforce_retention_duration=False, full=True)
    return num_bytes


def _size(lake: Lake, name: str, path: str) -> int:
    try:
        return lake.store(name).head(unquote(path))["size"]
    except FileNotFoundError:
        return 0
