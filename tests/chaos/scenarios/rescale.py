"""A curate cluster that is stopped and started again with another number of processes, in the middle of groups."""

import time
from pathlib import Path

from tests.chaos.making import settings
from tests.chaos.processes import wait
from tests.chaos.stream import RECOVERY_S, Stream
from tests.chaos.table import Row
from tests.conftest import running_broker

SIZES = (2, 3, 1)


def run(rounds: int, folder: Path) -> list[Row]:
    """A round goes through all sizes; the producer never stops, so groups are half complete each time."""
    with running_broker(folder) as address:
        return torment(Stream(settings(folder, address, sink_partitions=max(SIZES)), folder), rounds)


def torment(stream: Stream, rounds: int) -> list[Row]:
    """Recovery counts from the order to stop until the next size has written rows."""
    row, fleet = Row("curate, rescaled"), stream.curate.fleet
    try:
        stream.producer.live()
        for size in (*SIZES * rounds, SIZES[0]):
            began, before = time.monotonic(), stream.rows()
            if fleet.processes:
                fleet.stop()
                before = stream.rows()
            fleet.size = size
            fleet.start()
            wait(lambda before=before: stream.rows() > before, RECOVERY_S, f"{size} processes to go on")
            row.kills += 1
            row.recoveries_s.append(time.monotonic() - began)
        verdict = stream.settle()
    finally:
        stream.close()
    print(verdict.shown() or f"  rescale: {stream.made()} trajectories made, each came to its fate", flush=True)
    return [row.add(verdict)]
