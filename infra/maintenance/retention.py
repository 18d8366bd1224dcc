"""Retention of weight versions: the newest stay, and those that something still names."""

from collections.abc import Iterable, Mapping

from obstore.exceptions import BaseError

from infra.weights import WeightStore
from schemas.errors import WeightStoreError


def superfluous(versions: Iterable[int], keep: int, named: Iterable[int], parents: Mapping[int, int]) -> list[int]:
    """Those of `versions` that may go, ascending.

    Args:
        versions: all that are there.
        keep: how many of the newest stay.
        named: versions that a checkpoint, an eval or a service names; they stay.
        parents: of versions that are deltas or adapters, the one they build on; the parents of what stays stay.
    """
    versions = sorted(set(versions))
    kept = {*versions[-keep:], *named}
    waiting = list(kept)
    while waiting:
        parent = parents.get(waiting.pop())
        if parent is not None and parent not in kept:
            kept.add(parent)
            waiting.append(parent)
    return [version for version in versions if version not in kept]


def remove_versions(store: WeightStore, keep: int, named: Iterable[int]) -> tuple[list[int], int]:
    """Remove what may go from `store`, and what is left of removals and publications that a crash cut short.

    Returns:
        The versions removed, and the bytes that this freed.

    Raises:
        WeightStoreError: the store is away.
    """
    complete, named = store.versions(), set(named)
    gone = superfluous(complete, keep, named, _parents(store, complete))
    torn = [v for v in store.incomplete() if v < max(complete, default=0) and v not in named]
    return gone, sum(store.remove(version) for version in sorted([*gone, *torn]))


def _parents(store: WeightStore, versions: Iterable[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for version in versions:
        try:
            manifest = store.manifest(version)
        except WeightStoreError as error:
            if isinstance(error.__cause__, BaseError):
                raise  # the store is away: nobody can say what it names
            continue  # malformed: its readers say so; it names nothing
        if manifest.builds_on is not None:
            found[version] = manifest.builds_on
    return found
