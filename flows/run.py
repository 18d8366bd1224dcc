"""How a flow is run: recovery store, epochs, health, clean stop. `python -m flows.NAME` comes here."""

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig
from bytewax.testing import cluster_main, run_main

from flows.cluster import Cluster
from flows.connectors.delta_sink import DeltaSink
from flows.connectors.hold import HOLD
from flows.recovery import claim, recovery_store, sweep
from flows.watch import watch
from infra import disk
from infra.kafka import ensure_topics
from infra.lake import Fence, Lake
from infra.lease import Lease
from infra.telemetry import Stop, Telemetry, main
from schemas.errors import LagoonError, SettingsError
from schemas.settings import Settings, current

__all__ = ["of_current_run", "recovery_store", "run", "serve"]

_BACKUP = timedelta(seconds=10)
_SILENT_EPOCHS = 20


def serve(name: str, flow_for: Callable[[Settings, Stop], Dataflow]) -> None:
    """Be the process of flow `name`: make what topics and tables are missing, and run it until it is told to stop."""

    def run_it(settings: Settings, telemetry: Telemetry, stop: Stop) -> None:
        ensure_topics(settings.kafka, settings.kafka.timeout_s)
        Lake.of(settings).ensure()
        flow = flow_for(settings, stop)
        gc.freeze()  # modules never die: without them a full collection takes a tenth of the time
        run(flow, name, settings, telemetry, stop)

    main(name, run_it)


def of_current_run(flow_for: Callable[[Settings], Dataflow]) -> Callable[[str], Dataflow]:
    """`__getattr__` of a flow's module: attribute `flow`, which `python -m bytewax.run flows.NAME` asks for."""

    @cache
    def get(name: str) -> Dataflow:
        if name == "flow":
            return flow_for(current())
        raise AttributeError(f"module {flow_for.__module__!r} has no attribute {name!r}")

    return get


def run(flow: Dataflow, name: str, settings: Settings, telemetry: Telemetry, stop: Stop) -> None:
    """Run `flow` until it ends, with its recovery store in `<run>/recovery/<name>` and `curate.epoch_s` as its epoch.

    Give `stop` to the flow's source: once it is set, the source ends, what is pending is committed, and `run` returns.
    A flow that has not ended 8 s later is ended at once; its recovery store makes up for it. So it does where a part
    has been silent for too long, the clock was set back, or its lease is lost: the process then ends with status 1.

    The order of what comes first matters (`flows.connectors.delta_sink`): the lease is taken, the fence raised in every
    table, the recovery store claimed, and only then read.

    Raises:
        LagoonError: what a source, step or sink raised; another process runs this flow on the same lake; the disk of
            the recovery store is full.
    """
    folder, cluster = settings.run.folder / "recovery" / name, Cluster.of_environment()
    lease = Lease.of(settings, name)

    def prepare() -> None:
        if not cluster.process:
            _raise_fences(flow, lease.fence)
        claim(folder, lease.fence, settings.kafka.partitions)
        if not cluster.process:  # the others' Bytewax runs only once this one's does
            sweep(folder)

    epoch = timedelta(seconds=settings.curate.epoch_s)
    silence_s = max(30.0, _SILENT_EPOCHS * settings.curate.epoch_s) + settings.kafka.timeout_s
    room = disk.room(folder, f"the recovery store of {name}")
    with room, _held(cluster, lease, prepare), watch(telemetry, stop, silence_s):
        try:
            _run(flow, cluster, RecoveryConfig(folder, _BACKUP), epoch)
        except BaseException as error:  # what Bytewax's own store raises is no Exception
            reason = reason_of(error)
            if reason is None:
                raise
            raise reason from None


def _run(flow: Dataflow, cluster: Cluster, recovery: RecoveryConfig, epoch: timedelta) -> None:
    if cluster.is_single:
        run_main(flow, epoch_interval=epoch, recovery_config=recovery)
    else:
        cluster_main(
            flow,
            list(cluster.addresses),
            cluster.process,
            epoch_interval=epoch,
            recovery_config=recovery,
            worker_count_per_proc=cluster.threads,
        )


@contextmanager
def _held(cluster: Cluster, lease: Lease, prepare: Callable[[], None]) -> Generator[None]:
    """Hold the lease, with all that must be ready before the flow runs."""
    cluster.hold(lease, prepare)
    HOLD.lease = lease
    with lease.kept():
        yield


def _raise_fences(flow: Dataflow, number: int) -> None:
    """From here on nobody with an earlier lease commits to the tables of this flow."""
    for sink in _sinks(flow):
        parts = [Fence(sink.fence(part), number) for part in sink.list_parts()]
        sink.lake.raise_fences(sink.table, parts)


def _sinks(scope: Any) -> Iterator[DeltaSink]:
    """The sinks of a flow, or of one of its operators, that write to the lake."""
    for operator in getattr(scope, "substeps", ()):
        sink = getattr(operator, "sink", None)
        if isinstance(sink, DeltaSink):
            yield sink
        yield from _sinks(operator)


def reason_of(error: BaseException | None) -> LagoonError | None:
    """The LagoonError inside what Bytewax raises around it, or that stands for an error of its own; else None."""
    if "routing map" in str(error):
        return SettingsError(
            f"the recovery store holds partitions that the flow no longer has ({error}); within a run "
            "lake.sink_partitions may grow but never shrink, and kafka.partitions stays: set the old value again, or "
            "start a new run"
        )
    while error is not None and not isinstance(error, LagoonError):
        error = error.__cause__ or error.__context__
    return error
