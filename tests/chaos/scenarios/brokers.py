"""Three brokers under a producer and a curate process: one at a time dies by kill -9, or stands still for a while."""

import random
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from tests.chaos import record
from tests.chaos.brokers import NODES, Brokers, three_brokers
from tests.chaos.making import settings
from tests.chaos.processes import wait
from tests.chaos.stream import RECOVERY_S, Stream
from tests.chaos.table import Row

Fault = Callable[[Stream, Brokers, Row], None]

STILL_S = (3.0, 20.0)
"""Longer than a broker's session (9 s) in about two thirds of the cases."""


def run(rounds: int, folder: Path) -> list[Row]:
    """A round kills one machine and stops one."""
    with three_brokers(folder) as brokers:
        return torment(brokers, folder, [kill, stop] * rounds)


def torment(brokers: Brokers, folder: Path, faults: Sequence[Fault]) -> list[Row]:
    """Recovery counts from the fault until what was made after it is in the lake, with one machine missing."""
    found = settings(folder, brokers.address, kafka={"replication": NODES, "timeout_s": 120})
    stream = Stream(found, folder, quiet_s=60)
    rows = {fault: Row(f"broker, one of 3: {fault.__name__}") for fault in faults}
    try:
        stream.producer.live()
        stream.curate.live()
        for fault in faults:
            fault(stream, brokers, rows[fault])
            brokers.wait_whole()
        verdict = stream.settle()
    finally:
        stream.close()
    print(verdict.shown() or f"  brokers: {stream.made()} trajectories made, each came to its fate", flush=True)
    next(iter(rows.values())).add(verdict)
    return list(rows.values())


def kill(stream: Stream, brokers: Brokers, row: Row) -> None:
    """Kill -9 one, and start it again once the others have shown that they can do without."""
    victim = random.randrange(NODES)
    brokers.kill(victim)
    _recover(stream, row)
    brokers.start(victim)


def stop(stream: Stream, brokers: Brokers, row: Row) -> None:
    """Let one stand still, its connections open."""
    victim, still_s = random.randrange(NODES), random.uniform(*STILL_S)
    brokers.stop(victim)
    began = time.monotonic()
    try:
        _recover(stream, row)
        time.sleep(max(0.0, began + still_s - time.monotonic()))
    finally:
        brokers.wake(victim)


def _recover(stream: Stream, row: Row) -> None:
    """Wait for something that was made after the fault to reach the lake."""
    row.kills += 1
    began, made = time.monotonic(), stream.made()
    wait(lambda: _is_in_lake(stream, made), RECOVERY_S, "the lake to go on without one of three brokers", every_s=0.5)
    row.recoveries_s.append(time.monotonic() - began)


def _is_in_lake(stream: Stream, after: int) -> bool:
    """Whether the ledger has any trajectory that the journal has after its first `after`."""
    new = [entry.trajectory_id for entry in islice(record.read(stream.journal), after, None)]
    ledger = DeltaTable(f"{stream.settings.lake_uri}/ledger").to_pyarrow_dataset()
    return ledger.count_rows(filter=pc.field("trajectory_id").isin(pa.array(new, pa.string()))) > 0
