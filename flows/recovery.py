"""The recovery store of a flow: Bytewax's files, and what they were written under.

Someone who lost the lease may still have them open and write to them when it wakes up, under epochs that the new
holder uses too. So a new holder whose lease has a new fence goes on with a copy, and the old files are unlinked: what
is written to those is seen by nobody.
"""

import os
import shutil
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

from bytewax.recovery import init_db_dir

from infra.locks import locked
from schemas.errors import LagoonError, SettingsError
from schemas.messages import Message, decode

STORE_PARTITIONS = 4
"""Files of a recovery store. Fixed for ever; more let more workers write at once."""

_NOTE, _FILES = "store.json", "part-*.sqlite3"
_LOCK_WAIT_S = 30.0


class Note(Message):
    """What a store was written under: the fence of the lease, and settings that must stay while it lives."""

    fence: int
    partitions: int


def recovery_store(folder: Path) -> Path:
    """The recovery store in `folder`, made where there is none; harmless when several processes do so at once."""
    if not any(folder.glob(_FILES)):
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
        fresh.mkdir()
        init_db_dir(fresh, STORE_PARTITIONS)
        try:
            fresh.rename(folder)  # replaces an empty folder only: a store is there whole or not at all
        except OSError:
            shutil.rmtree(fresh)
    return folder


def claim(folder: Path, fence: int, partitions: int) -> Path:
    """The recovery store in `folder`, for the holder of `fence` alone; to be called under the lease.

    Raises:
        SettingsError: it was written under another number of `partitions`.
        LagoonError: a process on the way through here has stopped.
    """
    lock = folder.with_name(f"{folder.name}.lock")
    stopped = LagoonError(
        f"another process has had {lock} locked for {_LOCK_WAIT_S:g} s, which takes a moment when all is well: it has "
        "been stopped. End it"
    )
    with locked(lock, _LOCK_WAIT_S, stopped):
        _finish(folder)
        note = _note(recovery_store(folder))
        if note is not None and note.partitions != partitions:
            raise SettingsError(_refusal(folder, note.partitions, partitions))
        if note is None and fence == 0:
            _write(folder, Note(fence=fence, partitions=partitions))
        elif note is None or note.fence < fence:
            _replace(folder, Note(fence=fence, partitions=partitions))
    return folder


def resume_epoch(folder: Path) -> int:
    """The epoch at which Bytewax goes on from the store in `folder`; 0 if nothing has run on it.

    That is where the last worker of the last execution stood: the least of the workers' frontiers, each of which counts
    from the epoch at which that execution itself had resumed. Their rows lie in whichever file was at hand.
    """
    executions: dict[int, tuple[int, int]] = {}
    frontiers: dict[tuple[int, int], int] = {}
    for path in sorted(folder.glob(_FILES)):
        with closing(sqlite3.connect(path, timeout=10)) as store:
            for number, workers, began in store.execute("SELECT ex_num, worker_count, resume_epoch FROM exs"):
                executions[number] = workers, began
            for number, worker, epoch in store.execute("SELECT ex_num, worker_index, worker_frontier FROM fronts"):
                frontiers[number, worker] = max(epoch, frontiers.get((number, worker), 0))
    if not executions:
        return 0
    last = max(executions)
    workers, began = executions[last]
    return min(max(began, frontiers.get((last, worker), 0)) for worker in range(workers))


def sweep(folder: Path) -> int:
    """Remove what an earlier execution wrote for epochs that will be run again; to be called before the flow runs.

    Bytewax keeps such snapshots, and tells executions apart by nothing. A state that the next execution does not touch
    in the same epoch would come back at a later resume as the dead execution had left it, with input that was read
    again: its rows would be taken for repetitions, and be lost. Returns how many were removed.
    """
    epoch, removed = resume_epoch(folder), 0
    for path in folder.glob(_FILES):
        with closing(sqlite3.connect(path, timeout=10)) as store, store:
            removed += store.execute("DELETE FROM snaps WHERE snap_epoch >= ?", (epoch,)).rowcount
    return removed


def _replace(folder: Path, note: Note) -> None:
    """Put a copy in the place of `folder`; cut short at any point, `_finish` makes it whole."""
    copy = _copy_of(folder)
    copy.mkdir()
    for path in folder.glob(_FILES):
        with closing(sqlite3.connect(path, timeout=10)) as source, closing(sqlite3.connect(copy / path.name)) as target:
            source.backup(target)
    _write(copy, note)
    folder.rename(folder.with_name(f".{folder.name}-old-{uuid.uuid4().hex}"))
    _finish(folder)


def _finish(folder: Path) -> None:
    """The copy is whole if the store has been moved away for it, else it is thrown away."""
    copy = _copy_of(folder)
    if copy.exists() and not folder.exists():
        copy.rename(folder)
    shutil.rmtree(copy, ignore_errors=True)
    for old in folder.parent.glob(f".{folder.name}-old-*"):
        shutil.rmtree(old)


def _copy_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-next")


def _note(folder: Path) -> Note | None:
    path = folder / _NOTE
    return decode(Note, path.read_bytes()) if path.exists() else None


def _write(folder: Path, note: Note) -> None:
    temporary = folder / f".{_NOTE}"
    temporary.write_bytes(note.to_bytes())
    os.replace(temporary, folder / _NOTE)


def _refusal(folder: Path, before: int, now: int) -> str:
    return (
        f"kafka.partitions is {now}, but the recovery store {folder} was written with {before}. A group's messages go "
        "to partition `shard % partitions`: with another number they would change partitions in the middle of it, and "
        f"outboxes number theirs by partition. Set kafka.partitions = {before}; or start a new run (run.name and "
        "kafka.topic_prefix), whose topics have the new number: docs/operations.md, Partitions"
    )
