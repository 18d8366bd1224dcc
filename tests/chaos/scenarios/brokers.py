"""Three brokers under a producer and a curate process: one at a time dies by kill -9, or stands still for a while."""

import random
import time
from pathlib import Path

from tests.chaos.brokers import NODES, Brokers, three_brokers
from tests.chaos.making import settings
from tests.chaos.processes import wait
from tests.chaos.stream import RECOVERY_S, Stream
from tests.chaos.table import Row

STILL_S = (3.0, 20.0)
"""Longer than a broker's session (9 s) in about two thirds of the cases."""


def run(rounds: int, folder: Path) -> list[Row]:
    """A round kills one machine and stops one."""
    with three_brokers(folder) as brokers:
        found = settings(folder, brokers.address, kafka={"replication": NODES, "timeout_s": 120})
        stream = Stream(found, folder, quiet_s=60)
        return torment(stream, brokers, rounds)


def torment(stream: Stream, brokers: Brokers, rounds: int) -> list[Row]:
    """Recovery counts from the fault until the lake has new rows: with a machine missing, for a dead one."""
    killed, stopped = Row("broker, one of 3 killed"), Row("broker, one of 3 stopped")
    try:
        stream.producer.live()
        stream.curate.live()
        for _ in range(rounds):
            _kill(stream, brokers, killed)
            _stop(stream, brokers, stopped)
        verdict = stream.settle()
    finally:
        stream.close()
    print(verdict.shown() or f"  brokers: {stream.made()} trajectories made, each came to its fate", flush=True)
    return [killed.add(verdict), stopped]


def _kill(stream: Stream, brokers: Brokers, row: Row) -> None:
    victim = random.randrange(NODES)
    brokers.kill(victim)
    _recover(stream, row)
    brokers.start(victim)
    brokers.wait_whole()


def _stop(stream: Stream, brokers: Brokers, row: Row) -> None:
    victim = random.randrange(NODES)
    brokers.stop(victim)
    still_s = random.uniform(*STILL_S)
    began = time.monotonic()
    try:
        _recover(stream, row)
        time.sleep(max(0.0, began + still_s - time.monotonic()))
    finally:
        brokers.wake(victim)
    brokers.wait_whole()


def _recover(stream: Stream, row: Row) -> None:
    """Wait for what was made after the fault to reach the lake: as many rows as were made before it, and some."""
    row.kills += 1
    began, target = time.monotonic(), stream.made() + 1
    wait(lambda: stream.rows() > target, RECOVERY_S, "the lake to go on without one of three brokers")
    row.recoveries_s.append(time.monotonic() - began)
