"""A curate cluster of three processes, and the producer that feeds it: each dies at its fail-points and at random."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deltalake import DeltaTable

from infra.kafka import ensure_topics
from infra.lake import Lake
from schemas.settings import Settings
from tests.chaos import record
from tests.chaos.judge import accounted, judge_stream
from tests.chaos.making import settings
from tests.chaos.processes import Fleet, wait, waited
from tests.chaos.table import Row
from tests.conftest import running_broker

PROCESSES = 3
SINK = ("sink.after_stage", "sink.before_commit", "sink.after_commit")
OUTBOX = ("outbox.after_episode", "outbox.after_pack", "outbox.after_send", "outbox.before_acknowledgement")
AT_RANDOM = ""
RECOVERY_S = 60.0
STRIKE_S = 60.0
SETTLE_S = 180.0


def run(rounds: int, folder: Path) -> list[Row]:
    """A round kills a worker, and the producer, at each fail-point (workers early and late) and at random moments."""
    with running_broker(folder) as address:
        found = settings(folder, address, sink_partitions=PROCESSES)
        return Stream(found, folder).torment(rounds)


class Stream:
    """A producer, a curate cluster, and the lake behind them."""

    def __init__(self, found: Settings, folder: Path) -> None:
        self.settings, self.journal = found, folder / "journal"
        found.save(folder / "settings.json")
        config = ["--config", str(folder / "settings.json")]
        ensure_topics(found.kafka, 60)
        Lake.of(found).ensure()
        generate = ["-m", "tests.chaos.generator", *config, "--journal", str(self.journal)]
        curate = Fleet(["-m", "flows.curate", *config], folder / "curate.log", PROCESSES, cluster=True)
        self.curate = Victim("curate, one of 3", curate, self.rows)
        self.producer = Victim("producer", Fleet(generate, folder / "producer.log"), self.made)

    def torment(self, rounds: int) -> list[Row]:
        """Kill both side by side; then let everything settle, and judge."""
        try:
            with ThreadPoolExecutor() as pool:
                deaths = [pool.submit(self._kill_workers, rounds), pool.submit(self._kill_producer, rounds)]
            for death in deaths:
                death.result()
            self.producer.fleet.stop()
            waited(lambda: accounted(self.settings) >= self.made(), SETTLE_S, every_s=1)
            self.curate.fleet.stop()
        finally:
            self.producer.fleet.kill()
            self.curate.fleet.kill()
        verdict = judge_stream(self.settings, self.journal)
        print(verdict.shown() or f"  curate: {self.made()} trajectories made, each came to its fate", flush=True)
        self.curate.row.add(verdict)
        return [self.curate.row, self.producer.row]

    def _kill_workers(self, rounds: int) -> None:
        for number in range(rounds):
            for point in (*SINK, AT_RANDOM):
                self.curate.die(point, 1)
                self.curate.die(point, 0.03)
            print(f"  curate: round {number + 1} of {rounds}, {self.rows()} rows in the ledger", flush=True)
        self.curate.live()

    def _kill_producer(self, rounds: int) -> None:
        for _ in range(rounds):
            for point in (*OUTBOX, AT_RANDOM):
                self.producer.die(point, 0.02)
        self.producer.live()

    def rows(self) -> int:
        """Rows of the ledger, by the lake's log alone."""
        return DeltaTable(f"{self.settings.lake_uri}/ledger").count()

    def made(self) -> int:
        """Trajectories in the journal."""
        return len(list(record.read(self.journal))) if self.journal.exists() else 0


class Victim:
    """A fleet that is killed and started again, with its progress watched.

    Recovery counts from a kill until `progress` moves; a kill that comes before that starts the count anew.
    """

    def __init__(self, name: str, fleet: Fleet, progress: Callable[[], int]) -> None:
        self.row, self.fleet, self._progress = Row(name), fleet, progress
        self._died_at: float | None = None

    def live(self, failpoint: str = "") -> None:
        """Start; returns when there is progress, or `failpoint` has struck before there was any."""
        before = self._progress()
        self.fleet.start(failpoint, on=random.randrange(self.fleet.size))
        moved = lambda: self._progress() > before  # noqa: E731
        wait(lambda: moved() or not self.fleet.is_whole, RECOVERY_S, f"{self.row.victim} to go on")
        if self._died_at is not None and moved():
            self.row.recoveries_s.append(time.monotonic() - self._died_at)

    def die(self, point: str, chance: float) -> None:
        """One life that ends at `point`, each time that it comes there with `chance`; or at a random moment."""
        self.live(f"{point}={chance}" if point else "")
        if point:
            wait(lambda: not self.fleet.is_whole, STRIKE_S, f"{point} to strike {self.row.victim}")
        else:
            time.sleep(random.uniform(0, 2))
            self.fleet.kill_one()
        self._died_at = time.monotonic()
        self.row.kills += 1
        self.fleet.bury()
