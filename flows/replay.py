"""Rebuilds a lake from the log: the curate flow from the oldest message to the newest, once, into an empty lake.

python -m flows.replay [--from TIME|OFFSET] [--to TIME|OFFSET] [--config FILE ...] [--section.key=value ...]

`lagoon replay trajectories` starts it with a run folder of its own. The lake is `lake.uri`; it must be empty.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from bytewax.dataflow import Dataflow

from flows import curate
from flows.connectors.delta_sink import DeltaSink
from flows.connectors.epochs import Flag
from flows.connectors.refetch import Refetch
from flows.connectors.replay_source import Progress, ReplaySource
from flows.run import run
from infra.claims import Claims
from infra.lake import Lake
from infra.replays import refuse_used
from infra.telemetry import Stop, Telemetry, main
from schemas.errors import LagoonError
from schemas.names import Service
from schemas.replay import Limit, Range
from schemas.settings import Settings
from schemas.topics import CONTROL, TRAJECTORIES, WEIGHTS

REPLAY = "replay"

CLIENT = f"{Service.CURATE}-{REPLAY}"
"""Begins as the groups of curate do, whose rights on the broker suffice."""


def flow_for(settings: Settings, span: Range, progress: Progress, stop: Flag | None = None) -> Dataflow:
    """The curate flow over what the log holds of `span`, without reports; nothing is opened before it runs."""
    source = ReplaySource(
        settings.kafka,
        (TRAJECTORIES.name, WEIGHTS.name, CONTROL.name),
        span=span,
        progress=progress,
        epoch_bytes=settings.curate.epoch_bytes,
        client_id=CLIENT,
        stop=stop,
    )
    lake, parts = Lake.of(settings), settings.lake.sink_partitions
    return curate.build(
        source,
        lambda table: DeltaSink(lake, table, Service.CURATE, parts),
        None,
        Refetch(settings.kafka, TRAJECTORIES.name, f"{CLIENT}-refetch", Claims.of(settings)),
        settings,
    )


def serve(span: Range, settings: Settings, telemetry: Telemetry, stop: Stop) -> None:
    """Run the flow to the end of the log.

    Raises:
        LakeError: the lake's place holds something.
        LagoonError: `stop` was set before the end.
    """
    refuse_used(settings.lake_uri, settings.lake.storage_options)
    Lake.of(settings).ensure()
    progress = Progress()
    run(flow_for(settings, span, progress, stop), REPLAY, settings, telemetry, stop)
    progress.show()
    if stop:
        raise LagoonError("the replay was asked to end before the end of the log")


def start(argv: Sequence[str]) -> None:
    """The edge of the process."""
    parser = argparse.ArgumentParser(prog=REPLAY, allow_abbrev=False, add_help=False)
    parser.add_argument("--from", dest="start", type=Limit.of)
    parser.add_argument("--to", dest="end", type=Limit.of)
    args, rest = parser.parse_known_args(argv)
    main(REPLAY, partial(serve, Range(args.start, args.end)), rest)


if __name__ == "__main__":
    start(sys.argv[1:])
