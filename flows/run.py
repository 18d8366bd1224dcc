"""How a flow is run: recovery store, epochs, health, clean stop. `python -m flows.NAME` comes here."""

import fcntl
import os
import shutil
import threading
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import cluster_main, run_main

from flows.connectors.pulse import PULSE, log
from infra.telemetry import Stop, Telemetry
from schemas.errors import LagoonError, SettingsError
from schemas.settings import Settings

STORE_PARTITIONS = 4
"""Files of a recovery store. Fixed for ever; more let more workers write at once."""

ADDRESSES, PROCESS_ID, THREADS = "BYTEWAX_ADDRESSES", "BYTEWAX_PROCESS_ID", "BYTEWAX_WORKERS_PER_PROCESS"
"""Environment variables of a cluster, as for `python -m bytewax.run`: `host:port;host:port`, index, worker threads."""

_BACKUP = timedelta(seconds=10)
_HEALTH_S = 0.5
_SILENT_EPOCHS = 20
_LOCK_WAIT_S = 5.0
_DRAIN_S = 8.0


def run(flow: Dataflow, name: str, settings: Settings, telemetry: Telemetry, stop: Stop) -> None:
    """Run `flow` until it ends, with its recovery store in `<run>/recovery/<name>` and `curate.epoch_s` as its epoch.

    Give `stop` to the flow's source: once it is set, the source ends, what is pending is committed, and `run` returns.
    A flow that has not ended 8 s later is ended at once; its recovery store makes up for it.

    Raises:
        LagoonError: what a source, step or sink raised; or another process runs this flow.
    """
    folder = recovery_store(settings.run.folder / "recovery" / name)
    epoch = timedelta(seconds=settings.curate.epoch_s)
    silence_s = max(30.0, _SILENT_EPOCHS * settings.curate.epoch_s) + settings.kafka.timeout_s
    with _lease(folder), _watch(telemetry, stop, silence_s):
        try:
            _run(flow, RecoveryConfig(folder, _BACKUP), epoch)
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
            raise reason from None


def recovery_store(folder: Path) -> Path:
    """The recovery store in `folder`, made where there is none; harmless when several processes do so at once."""
    if not any(folder.glob("part-*.sqlite3")):
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
        fresh.mkdir()
        init_db_dir(fresh, STORE_PARTITIONS)
        try:
            fresh.rename(folder)  # replaces an empty folder only: a store is there whole or not at all
        except OSError:
            shutil.rmtree(fresh)
    return folder


def _run(flow: Dataflow, recovery: RecoveryConfig, epoch: timedelta) -> None:
    addresses = [a.strip() for a in os.environ.get(ADDRESSES, "").split(";") if a.strip()]
    threads = int(os.environ.get(THREADS, "1"))
    if len(addresses) > 1 or threads > 1:
        process = int(os.environ.get(PROCESS_ID, "0"))
        cluster_main(
            flow, addresses, process, epoch_interval=epoch, recovery_config=recovery, worker_count_per_proc=threads
        )
    else:
        run_main(flow, epoch_interval=epoch, recovery_config=recovery)


@contextmanager
def _lease(folder: Path) -> Generator[None]:
    """Keep a second process off this recovery store: two flows on one store would write everything twice."""
    path = folder.with_name(f"{folder.name}.lock-{os.environ.get(PROCESS_ID, '0')}")
    deadline = time.monotonic() + _LOCK_WAIT_S
    with open(path, "a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LagoonError(
                        f"another process runs on the recovery store {folder} (it holds {path.name}) and has not ended "
                        f"within {_LOCK_WAIT_S:g} s; stop it first"
                    ) from None
                time.sleep(0.1)
        yield


@contextmanager
def _watch(telemetry: Telemetry, stop: Stop, silence_s: float) -> Generator[None]:
    """Report health, and see to it that a stop has an end, while the flow runs in the calling thread."""
    ended = threading.Event()

    def watch() -> None:
        end_at = None
        while not ended.wait(_HEALTH_S):
            fault = PULSE.fault(silence_s)
            telemetry.health(not fault, fault)
            end_at = end_at or (time.monotonic() + _DRAIN_S if stop else None)
            if end_at is not None and time.monotonic() > end_at:
                log.warning("the flow has not drained within %g s of being asked to end; ending at once", _DRAIN_S)
                telemetry.close()
                os._exit(0)  # as safe as kill -9, which the recovery store is made for

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def reason_of(error: BaseException | None) -> LagoonError | None:
    """The LagoonError inside what Bytewax raises around it, or that stands for an error of its own; else None."""
    if "routing map" in str(error):
        return SettingsError(
            f"the recovery store holds partitions that the flow no longer has ({error}); lake.sink_partitions and "
            "kafka.partitions may grow but never shrink within a run: set the old value again, or start a new run"
        )
    while error is not None and not isinstance(error, LagoonError):
        error = error.__cause__ or error.__context__
    return error
