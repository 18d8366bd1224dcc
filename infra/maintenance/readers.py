"""What the others still need: versions of the log and of the weights that checkpoints, evals and services name."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

import math
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, ValidationError

from infra.lake import Lake
from infra.maintenance.compaction import open_table
from schemas.errors import LagoonError

OPEN_FOR = timedelta(hours=1)
"""A service is open if its last report is at most this much older than the newest report of any service."""


FOLLOWED = ("experience", "ledger")
"""Tables that a learner reads commit by commit."""


class _Part(BaseModel):
    """The part of a learner's file that is looked at."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Publication(_Part):
    version: int


class _State(_Part):
    weight_version: int
    publication: _Publication | None = None


class _Manifest(_Part):
    state: _State


class _Cursor(_Part):
    experience_version: int
    ledger_version: int


M = TypeVar("M", bound=_Part)


def checkpoint_versions(folder: Path) -> set[int]:
    """Weight versions that the learner's complete checkpoints under `folder` were made at, or publish.

    Raises:
        LagoonError: a manifest cannot be read, so nobody can say what it names.
    """
    states = [manifest.state for manifest in _read(folder, "MANIFEST.json", _Manifest)]
    published = {state.publication.version for state in states if state.publication}
    return {state.weight_version for state in states} | published


def cursors(folder: Path) -> dict[str, int]:
    """By table, the last Delta version that the oldest checkpoint under `folder` has read; empty without checkpoints.

    Raises:
        LagoonError: a cursor cannot be read.
    """
    found = list(_read(folder, "cursor.json", _Cursor))
    if not found:
        return {}
    return {
        "experience": min(cursor.experience_version for cursor in found),
        "ledger": min(cursor.ledger_version for cursor in found),
    }


def unread_h(lake: Lake, name: str, cursors: Mapping[str, int], now: datetime) -> int:
    """Hours, rounded up, since the first commit that the learner has still to read, from `cursors` or the beginning on.

    Files that came with that commit or later are read though they were merged since. 0 where all is read, where the
    beginning has been cleaned away, so that a snapshot is read, and for tables that no learner follows.
    """
    if name not in FOLLOWED:
        return 0
    commit = lake.log(name).commit(cursors.get(name, -1) + 1)
    if commit is None:
        return 0
    at = min((action["commitInfo"]["timestamp"] for action in commit if "commitInfo" in action), default=0) / 1000
    return max(0, math.ceil((now.timestamp() - at) / 3600))


def best_versions(lake: Lake) -> set[int]:
    """Weight versions with the highest score, or the highest lower bound, of all evals: the champion is among them."""
    columns = ["end_version", "score", "low"]
    rows: list[dict[str, Any]] = open_table(lake, "evals").to_pyarrow_dataset().to_table(columns=columns).to_pylist()
    best: set[int] = set()
    for measure in ("score", "low"):
        scored = [row for row in rows if row[measure] is not None]
        highest = max((row[measure] for row in scored), default=None)
        best |= {row["end_version"] for row in scored if row[measure] == highest}
    return best


def served_versions(lake: Lake) -> set[int] | None:
    """Weight versions that open services reported last; None where no service has reported yet."""
    usage = open_table(lake, "usage").to_pyarrow_dataset()
    newest = pc.max(usage.to_table(columns=["ended_at"])["ended_at"]).as_py()
    if newest is None:
        return None
    columns = ["service", "instance", "ended_at", "weight_version"]
    rows = usage.to_table(columns=columns, filter=pc.field("ended_at") >= newest - OPEN_FOR).sort_by("ended_at")
    last = {(row["service"], row["instance"]): row["weight_version"] for row in rows.to_pylist()}
    return {version for version in last.values() if version is not None}


def _read(folder: Path, name: str, model: type[M]) -> Iterator[M]:
    """File `name` of every complete checkpoint."""
    for path in (manifest.with_name(name) for manifest in sorted(folder.glob("step-*/MANIFEST.json"))):
        try:
            yield model.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            continue  # the learner has removed this checkpoint just now
        except ValidationError as error:
            raise LagoonError(
                f"{path} is not what a checkpoint holds ({error.error_count()} faults, first: "
                f"{error.errors()[0]['msg']}); nothing that it may name is removed. Restore it, or move it away"
            ) from error
