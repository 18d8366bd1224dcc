"""A curate cluster of three processes, and the producer that feeds it: each dies at its fail-points and at random."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos.making import settings
from tests.chaos.stream import Stream
from tests.chaos.table import Row
from tests.conftest import running_broker

PROCESSES = 3
SINK = ("sink.after_stage", "sink.before_commit", "sink.after_commit")
OUTBOX = ("outbox.after_episode", "outbox.after_pack", "outbox.after_send", "outbox.before_acknowledgement")
AT_RANDOM = ""


def run(rounds: int, folder: Path) -> list[Row]:
    """A round kills a worker, and the producer, at each fail-point (workers early and late) and at random moments."""
    with running_broker(folder) as address:
        return torment(Stream(settings(folder, address, sink_partitions=PROCESSES), folder, PROCESSES), rounds)


def torment(stream: Stream, rounds: int) -> list[Row]:
    """Kill workers and producer side by side; then let everything settle, and judge."""
    try:
        with ThreadPoolExecutor() as pool:
            deaths = [pool.submit(kill, stream, rounds) for kill in (_kill_workers, _kill_producer)]
        for death in deaths:
            death.result()
        verdict = stream.settle()
    finally:
        stream.close()
    print(verdict.shown() or f"  curate: {stream.made()} trajectories made, each came to its fate", flush=True)
    return [stream.curate.row.add(verdict), stream.producer.row]


def _kill_workers(stream: Stream, rounds: int) -> None:
    for number in range(rounds):
        for point in (*SINK, AT_RANDOM):
            stream.curate.die(point, 1)
            stream.curate.die(point, 0.03)
        print(f"  curate: round {number + 1} of {rounds}, {stream.rows()} rows in the ledger", flush=True)
    stream.curate.live()


def _kill_producer(stream: Stream, rounds: int) -> None:
    for _ in range(rounds):
        for point in (*OUTBOX, AT_RANDOM):
            stream.producer.die(point, 0.02)
    stream.producer.live()
