"""The lake by deltalake and DuckDB alone: no view and no client of Lagoon's stands between judge and rows."""

from typing import Any

import duckdb
from deltalake import DeltaTable

from schemas.settings import Settings

OUTCOMES = ("admitted", "stale", "duplicate", "no_signal", "invalid")


class Tables:
    """The tables of a run's lake as they are now."""

    def __init__(self, settings: Settings) -> None:
        self._root, self._options = settings.lake_uri, dict(settings.lake.storage_options)
        self._connection = duckdb.connect()
        self._registered: set[str] = set()

    def rows(self, query: str, *tables: str) -> list[tuple[Any, ...]]:
        """The rows of `query`, which reads `tables`."""
        for name in {*tables} - self._registered:
            handle = DeltaTable(f"{self._root}/{name}", storage_options=self._options)
            self._connection.register(name, handle.to_pyarrow_dataset())
            self._registered.add(name)
        return self._connection.sql(query).fetchall()

    def outcomes(self) -> list[tuple[str, str, str, int]]:
        """(trajectory id, outcome, group, tokens) of each admission outcome in the ledger."""
        query = f"select trajectory_id, event, group_id, num_tokens from ledger where event in {OUTCOMES}"
        return self.rows(query, "ledger")

    def letters(self) -> dict[str, tuple[int, int]]:
        """Trajectories and tokens in dead letters, by the message's key."""
        query = """select key, sum(num_rows)::bigint, sum(num_tokens)::bigint from dead_letters
            where kind = 'undecodable' group by key"""
        return {bytes(key).decode(): (rows, tokens) for key, rows, tokens in self.rows(query, "dead_letters")}

    def holes(self) -> int:
        """Ranges of offsets that expired unread."""
        return self.rows("select count(*) from dead_letters where kind = 'hole'", "dead_letters")[0][0]

    def experience(self) -> list[tuple[str, int]]:
        """(trajectory id, tokens) of each row that may be trained on."""
        return self.rows("select trajectory_id, len(token_ids) from experience", "experience")

    def closings(self) -> list[str]:
        """Groups that were closed, once for each time."""
        return [group for (group,) in self.rows("select group_id from groups", "groups")]
