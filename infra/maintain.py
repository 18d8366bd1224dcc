"""The maintenance process, `python -m infra.maintain`: small files merged, old ones removed, while the loop writes.

A pass that fails in one place goes on with the next one and says so; the next pass tries again. Killed at any point it
leaves files that nobody refers to, which a later vacuum removes.
"""

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

from deltalake.exceptions import DeltaError
from obstore.exceptions import BaseError
from prometheus_client import Counter, Gauge

from infra.claims import Claims
from infra.lake import Lake
from infra.logs import logger
from infra.maintenance import readers
from infra.maintenance.claims import remove_claims
from infra.maintenance.compaction import compact, open_table
from infra.maintenance.logs import checkpoint, clean_log
from infra.maintenance.orphans import vacuum
from infra.maintenance.retention import remove_versions
from infra.run_manifests import RunManifests
from infra.telemetry import Stop, Telemetry, main
from infra.weights import WeightStore
from schemas.errors import LagoonError
from schemas.names import Service
from schemas.settings import Settings
from schemas.tables import TABLES

FILES = Gauge("lagoon_lake_files", "Files of a table's newest version", ["table"])
COMPACTED = Counter("lagoon_maintenance_compacted_files", "Files merged into larger ones", ["table"])
RECLAIMED = Counter("lagoon_maintenance_reclaimed_bytes", "Bytes removed", ["kind"])
VERSIONS = Counter("lagoon_maintenance_weight_versions", "Weight versions removed")
CLAIMS = Counter("lagoon_maintenance_claims", "Claimed objects removed")
FAILURES = Counter("lagoon_maintenance_failures", "Parts of passes that failed", ["part"])
PASS_SECONDS = Gauge("lagoon_maintenance_pass_seconds", "Length of the last pass")

_EXPECTED = (LagoonError, DeltaError, BaseError, OSError)
_NICENESS = 10


def serve(settings: Settings, telemetry: Telemetry, stop: Stop) -> None:
    """Pass after pass, `maintenance.every_s` apart, until `stop`."""
    os.nice(_NICENESS)  # whatever else runs here is more urgent
    Lake.of(settings).ensure()
    upkeep = Upkeep(settings, lambda: bool(stop))
    while not stop:
        faults = upkeep.run()
        telemetry.health(not faults, "; ".join(faults))
        stop.wait(settings.maintenance.every_s)


class Upkeep:
    """The passes over a run's lake and weight store; `stopped` is asked between the parts of one."""

    def __init__(
        self,
        settings: Settings,
        stopped: Callable[[], bool] = lambda: False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ):
        self._settings, self._rules = settings, settings.maintenance
        self._stopped, self._now = stopped, now
        self._lake, self._weights = Lake.of(settings), WeightStore.of(settings)
        self._vacuumed_at: datetime | None = None
        self._log = logger(Service.MAINTENANCE)

    def run(self) -> list[str]:
        """One pass; what failed, in words."""
        began, faults = time.monotonic(), list[str]()
        vacuums = self._is_vacuum_due()
        cursors = self._try("cursors", partial(readers.cursors, self._settings.checkpoints), faults)
        for name in TABLES:
            self._try(name, partial(self._table, name, cursors, vacuums), faults)
        self._try("weights", self._retire_weights, faults)
        self._try("run manifests", RunManifests(self._lake).prune, faults)
        self._try("claims", self._remove_claims, faults)
        PASS_SECONDS.set(time.monotonic() - began)
        return faults

    def _table(self, name: str, cursors: dict[str, int] | None, vacuums: bool) -> None:
        began, rules = time.monotonic(), self._rules
        merged = compact(self._lake, name, rules.min_files, rules.target_bytes, self._now(), self._stopped)
        checkpoint(self._lake, name)
        log_bytes = data_bytes = 0
        if cursors is not None:  # else nobody knows what has still to be read
            log_bytes = clean_log(self._lake, name, rules.log_retention_h, self._now(), cursors.get(name))
            if vacuums and not self._stopped():
                unread_h = readers.unread_h(self._lake, name, cursors, self._now())
                data_bytes = vacuum(self._lake, name, rules.vacuum_retention_h + unread_h)
        files = len(open_table(self._lake, name).file_uris())
        self._count(name, files, merged, log_bytes, data_bytes)
        if merged or log_bytes or data_bytes:
            figures = {"files": files, "merged": merged, "log_bytes": log_bytes, "data_bytes": data_bytes}
            self._log.info("table", table=name, **figures, seconds=round(time.monotonic() - began, 3))

    def _retire_weights(self) -> None:
        served = readers.served_versions(self._lake)
        if served is None:
            return  # nobody knows yet who needs what
        named = served | readers.best_versions(self._lake) | readers.checkpoint_versions(self._settings.checkpoints)
        named |= {1} if self._settings.builds_on_start else set()  # a run that moves takes its starting policy there
        removed, num_bytes = remove_versions(self._weights, self._rules.keep_weight_versions, named)
        VERSIONS.inc(len(removed))
        RECLAIMED.labels("weights").inc(num_bytes)
        if removed:
            self._log.info("weights", removed=removed, bytes=num_bytes, named=sorted(named))

    def _remove_claims(self) -> None:
        retention_h = self._settings.kafka.retention_h
        removed, num_bytes = remove_claims(Claims.of(self._settings), self._lake, retention_h, self._now())
        CLAIMS.inc(removed)
        RECLAIMED.labels("claims").inc(num_bytes)
        if removed:
            self._log.info("claims", removed=removed, bytes=num_bytes)

    def _count(self, name: str, files: int, merged: int, log_bytes: int, data_bytes: int) -> None:
        FILES.labels(name).set(files)
        COMPACTED.labels(name).inc(merged)
        RECLAIMED.labels("log").inc(log_bytes)
        RECLAIMED.labels("data").inc(data_bytes)

    def _is_vacuum_due(self) -> bool:
        now = self._now()
        since = None if self._vacuumed_at is None else (now - self._vacuumed_at).total_seconds()
        due = since is None or since >= self._rules.vacuum_every_s
        self._vacuumed_at = now if due else self._vacuumed_at
        return due

    def _try(self, part: str, work: Callable[[], Any], faults: list[str]) -> Any:
        """The result of `work`, or None with a line in `faults`; nothing is done once the process is to end."""
        if self._stopped():
            return None
        try:
            return work()
        except _EXPECTED as error:
            FAILURES.labels(part).inc()
            faults.append(f"{part}: {error}")
            self._log.warning("failed", part=part, kind=type(error).__name__, error=str(error))
            return None


if __name__ == "__main__":
    main(Service.MAINTENANCE, serve)
