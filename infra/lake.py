"""The experience lake: Delta tables that are created as declared and appended to exactly once.

Appending has two phases, so that a sink can tie it to its own recovery: `stage` writes files, `commit` makes them part
of the table under a transaction (application id, sequence). A commit that is repeated, whether its reply was lost or
its process killed, is recognized by that sequence and skipped.

A fence keeps a writer out that another one has replaced, whenever it wakes up. Every commit of a writer carries its
fence as a second transaction (the fence's application id, the number of its holder's lease), and looks up whether the
table knows a higher number. Who takes over raises the fence first, with a transaction of its own: Delta refuses one of
two concurrent commits that carry the same application id, and the one that tries again finds the higher number.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import TableNotFoundError
from deltalake.transaction import AddAction
from obstore.store import ObjectStore

from infra.delta_log import DeltaLog
from infra.retries import retry
from infra.staging import Add, conform, stage
from infra.store import bounded, local_path, open_store
from infra.tables import prepare, promised_statistics
from schemas.errors import LakeError
from schemas.settings import Settings
from schemas.tables import TABLES, Table

T = TypeVar("T")

_NOTHING: Mapping[str, str] = MappingProxyType({})
_HOOKS = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)


@dataclass(frozen=True, slots=True)
class Fence:
    """`number` of the holder on whose behalf something is written; a table that knows a higher one refuses it."""

    app_id: str
    number: int


class Lake:
    """The tables under `uri`, a local folder or an object store. Safe to share between threads."""

    def __init__(self, uri: str, storage_options: Mapping[str, str] = _NOTHING):
        if any(k.lower().endswith("s3_allow_unsafe_rename") and v != "false" for k, v in storage_options.items()):
            raise LakeError(
                "AWS_S3_ALLOW_UNSAFE_RENAME gives up exactly-once commits; remove it from lake.storage_options"
            )
        folder = local_path(uri)
        self.uri = str(folder) if folder is not None else uri.rstrip("/")
        self.storage_options = bounded(uri, storage_options)
        self._folder = folder
        self._handles: dict[str, DeltaTable] = {}
        self._stores: dict[str, ObjectStore] = {}
        self._lock = threading.RLock()

    @classmethod
    def of(cls, settings: Settings) -> "Lake":
        """The lake of a run."""
        return cls(settings.lake_uri, settings.lake.storage_options)

    def ensure(self) -> None:
        """Create missing tables and add missing columns; harmless when repeated or done by several processes at once.

        Raises:
            LakeError: a table was written by newer code (unknown columns, other types, a higher protocol).
        """
        for table in TABLES.values():
            uri = self.table_uri(table.name)
            self.retry(f"preparing table {table.name} at {uri}", partial(prepare, table, uri, self.storage_options))

    def table(self, name: str) -> DeltaTable:
        """The cached handle of a table; refresh it with `update_incremental()`.

        Raises:
            LakeError: there is no such table.
        """
        with self._lock:
            if name not in self._handles:
                try:
                    self._handles[name] = DeltaTable(self.table_uri(name), storage_options=self.storage_options)
                except TableNotFoundError as error:
                    raise LakeError(f"no table {name} at {self.table_uri(name)}; Lake.ensure() creates it") from error
            return self._handles[name]

    def version(self, name: str) -> int:
        """The newest Delta version of a table."""
        return self.retry(f"{name}: reading its version", lambda: self._refreshed(name).version())

    def read(self, name: str, what: str, columns: list[str] | None = None, where: Any = None) -> pa.Table:
        """The rows of a table as it is now: those of its `columns` and `where` (an expression of pyarrow's datasets).

        Raises:
            LakeError: the table cannot be read; says that it was for `what`.
        """

        def attempt() -> pa.Table:
            return self._refreshed(name).to_pyarrow_dataset().to_table(columns=columns, filter=where)

        return self.retry(f"{name}: reading {what}", attempt)

    def stage(self, name: str, rows: pa.Table) -> list[Add]:
        """Write `rows` as files of table `name` that no reader sees yet; one file per partition.

        Returns:
            JSON-able add actions for `commit`, to be kept in recovery state.

        Raises:
            LakeError: rows that do not fit the table's schema.
        """
        return self._stage(name, conform(_declared(name), rows))

    def commit(self, name: str, adds: list[Add], app_id: str, sequence: int, fence: Fence | None = None) -> int | None:
        """Make staged files part of the table, once for each (app_id, sequence).

        Returns:
            The Delta version, or None where this sequence or a later one had been committed before (also by an earlier
            try of this call whose reply was lost), or there is nothing to commit.

        Raises:
            LakeError: a staged file is gone, the commit keeps failing, or `fence` is below the table's.
        """
        if not adds:
            return None
        with self._lock:
            return self.retry(
                f"{name}: committing sequence {sequence} of {app_id}",
                lambda: self._try_commit(name, adds, app_id, sequence, fence),
            )

    def raise_fences(self, name: str, fences: Sequence[Fence]) -> None:
        """Let nobody with a lower number commit to table `name` from now on; a no-op where they stand already.

        Raises:
            LakeError: one stands higher.
        """
        with self._lock:
            self.retry(f"{name}: raising {len(fences)} fences", lambda: self._try_raise(name, fences))

    def append(self, name: str, rows: pa.Table | list[dict[str, Any]], app_id: str, sequence: int) -> int | None:
        """Stage and commit `rows`; see `commit`. A repeated sequence writes nothing.

        Raises:
            LakeError: rows that do not fit the schema, or a commit that keeps failing.
        """
        table = conform(_declared(name), rows)
        if self.last_sequence(name, app_id) >= sequence:
            return None
        return self.commit(name, self._stage(name, table), app_id, sequence)

    def last_sequence(self, name: str, app_id: str) -> int:
        """The newest sequence that `app_id` has committed to table `name`; 0 if none."""
        return self.retry(f"{name}: reading the sequence of {app_id}", lambda: self._last_sequence(name, app_id))

    def app_ids(self, name: str, prefix: str) -> list[str]:
        """Application ids that start with `prefix` and have committed to table `name`, sorted."""
        transactions = self.retry(f"{name}: reading its transactions", self.log(name).transactions)
        return sorted(x for x in transactions if x.startswith(prefix))

    def retry(self, what: str, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, something that asks this lake, within the limits of `infra.retries`.

        Raises:
            LakeError: it failed for too long; says where, why and, if a disk is full, which one.
        """
        return retry(what, attempt, self._folder)

    def log(self, name: str) -> DeltaLog:
        """The transaction log of a table."""
        return DeltaLog(self.store(name), name)

    def store(self, name: str) -> ObjectStore:
        """The object store rooted at a table."""
        with self._lock:
            if name not in self._stores:
                self._stores[name] = open_store(self.table_uri(name), self.storage_options)
            return self._stores[name]

    def table_uri(self, name: str) -> str:
        """Where a table lies."""
        return f"{self.uri}/{name}"

    def _refreshed(self, name: str) -> DeltaTable:
        with self._lock:
            handle = self.table(name)
            handle.update_incremental()
            return handle

    def _last_sequence(self, name: str, app_id: str) -> int:
        # on a handle that is not refreshed this fails once a checkpoint has let the log be cleaned
        return self._refreshed(name).transaction_version(app_id) or 0

    def _stage(self, name: str, rows: pa.Table) -> list[Add]:
        folder = local_path(self.table_uri(name))

        def attempt() -> list[Add]:
            return stage(self.store(name), folder, _declared(name), promised_statistics(self.table(name)), rows)

        return self.retry(f"{name}: writing {rows.num_rows} rows to {self.table_uri(name)}", attempt)

    def _try_commit(self, name: str, adds: list[Add], app_id: str, sequence: int, fence: Fence | None) -> int | None:
        last = self._last_sequence(name, app_id)
        if fence is not None:  # first: what stands under this sequence may be the work of who took over
            self._check(name, fence)
        if last >= sequence:
            return None
        self._verify(name, adds)
        base = self.table(name).version()
        self._write(name, adds, {app_id: sequence} | ({fence.app_id: fence.number} if fence else {}))
        return self._version_of(name, app_id, sequence, base)

    def _try_raise(self, name: str, fences: Sequence[Fence]) -> None:
        self._refreshed(name)
        known = {fence: self._check(name, fence) for fence in fences}
        if low := {fence.app_id: fence.number for fence in fences if known[fence] < fence.number}:
            self._write(name, [], low)

    def _check(self, name: str, fence: Fence) -> int:
        """The number that the table knows, as of the last refresh."""
        known = self.table(name).transaction_version(fence.app_id) or 0
        if known > fence.number:
            raise LakeError(
                f"this process has lost its lease: table {name} takes commits of {fence.app_id} from lease generation "
                f"{known} on, this one has {fence.number}. Another process took over after this one had not answered "
                "(stopped, or cut off); nothing is committed, and the new holder does it again"
            )
        return known

    def _write(self, name: str, adds: list[Add], transactions: Mapping[str, int]) -> None:
        """Commit on the handle as it was last refreshed, so that what came since and matters is a conflict."""
        handle, now = self.table(name), time.time_ns() // 1_000_000
        handle.create_write_transaction(
            [AddAction(**add) for add in adds],
            mode="append",
            schema=handle.schema(),
            partition_by=handle.metadata().partition_columns,
            commit_properties=CommitProperties(
                app_transactions=[Transaction(*transaction, now) for transaction in transactions.items()],
                max_commit_retries=20,
            ),
            post_commithook_properties=_HOOKS,
        )

    def _version_of(self, name: str, app_id: str, sequence: int, after: int) -> int:
        """The first version above `after` that carries a transaction; delta-rs does not tell."""
        log, version = self.log(name), after
        while (actions := log.commit(version := version + 1)) is not None:
            transactions = [a["txn"] for a in actions if "txn" in a]
            if any(t["appId"] == app_id and t["version"] == sequence for t in transactions):
                return version
        raise LakeError(f"{name}: sequence {sequence} of {app_id} is in no version from {after + 1} to {version - 1}")

    def _verify(self, name: str, adds: list[Add]) -> None:
        """Delta commits files unseen; one that a vacuum has removed would make the table unreadable."""
        for add in adds:
            try:
                size = self.store(name).head(unquote(add["path"]))["size"]
            except FileNotFoundError:
                size = None
            if size != add["size"]:
                raise LakeError(
                    f"{name}: staged file {add['path']} has {size} bytes, expected {add['size']}; it was removed or "
                    "altered before its commit. Raise the vacuum retention above the time from stage to commit, and "
                    "stage the rows again"
                )


def _declared(name: str) -> Table:
    try:
        return TABLES[name]
    except KeyError:
        raise LakeError(f"no table {name!r}; the lake has {sorted(TABLES)}") from None
