"""The transaction log of one Delta table, read as it lies: commits, the last checkpoint, transaction ids.

delta-rs answers neither "which rows came with version N" nor "which application ids does this table know".
"""

import io
import json
from typing import Any

import pyarrow.parquet as pq
from obstore.store import ObjectStore

from schemas.errors import LakeError

Action = dict[str, Any]


class DeltaLog:
    """Reads `_delta_log` of the table at the root of `store`."""

    def __init__(self, store: ObjectStore, table: str):
        self._store = store
        self._table = table

    def commit(self, version: int) -> list[Action] | None:
        """The actions of commit `version`, or None where the log has no such file.

        Raises:
            LakeError: the file is there but is not a commit.
        """
        path = f"_delta_log/{version:020d}.json"
        try:
            body = bytes(self._store.get(path).bytes())
        except FileNotFoundError:
            return None
        try:
            return [json.loads(line) for line in body.splitlines() if line.strip()]
        except ValueError as error:
            raise LakeError(
                f"{self._table}: {path} is not a Delta commit ({error}); restore it from a backup"
            ) from error

    def exists(self, version: int) -> bool:
        """Whether the log still holds the file of commit `version`."""
        try:
            self._store.head(f"_delta_log/{version:020d}.json")
        except FileNotFoundError:
            return False
        return True

    def checkpoint(self) -> Action | None:
        """The content of `_last_checkpoint`, or None where no checkpoint has been written yet."""
        try:
            return json.loads(bytes(self._store.get("_delta_log/_last_checkpoint").bytes()))
        except FileNotFoundError:
            return None

    def transactions(self) -> dict[str, int]:
        """Newest sequence by application id, from the last checkpoint and the commits after it."""
        found: dict[str, int] = {}
        last = self.checkpoint()
        version = -1
        if last is not None:
            version = last["version"]
            for path in _checkpoint_parts(last):
                _note(found, self._checkpoint_transactions(path))
        while (actions := self.commit(version := version + 1)) is not None:
            _note(found, [a["txn"] for a in actions if "txn" in a])
        return found

    def _checkpoint_transactions(self, path: str) -> list[Action]:
        body = io.BytesIO(bytes(self._store.get(path).bytes()))
        rows = pq.read_table(body, columns=["txn"]).column("txn").to_pylist()
        return [row for row in rows if row is not None]


def _checkpoint_parts(last: Action) -> list[str]:
    version, parts = last["version"], last.get("parts")
    if parts is None:
        return [f"_delta_log/{version:020d}.checkpoint.parquet"]
    return [f"_delta_log/{version:020d}.checkpoint.{n:010d}.{parts:010d}.parquet" for n in range(1, parts + 1)]


def _note(found: dict[str, int], transactions: list[Action]) -> None:
    for transaction in transactions:
        found[transaction["appId"]] = transaction["version"]
