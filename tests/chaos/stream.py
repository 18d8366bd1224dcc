"""A producer of known fates, a curate cluster, and the lake behind them; both can be killed, and come back."""

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from deltalake import DeltaTable

from infra.kafka import ensure_topics
from infra.lake import Lake
from schemas.settings import Settings
from tests.chaos import record
from tests.chaos.judge import Verdict, accounted, judge_stream
from tests.chaos.processes import Fleet, wait
from tests.chaos.table import Row

RECOVERY_S = 120.0
STRIKE_S = 240.0
SETTLE_S = 300.0


class Stream:
    """The parts, over `settings`; their logs and the journal lie in `folder`. `quiet_s` without news ends the wait."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        processes: int = 1,
        environment: Mapping[str, str] | None = None,
        quiet_s: float = 30.0,
    ) -> None:
        self.settings, self.journal, self._quiet_s = settings, folder / "journal", quiet_s
        settings.save(folder / "settings.json")
        config = ["--config", str(folder / "settings.json")]
        ensure_topics(settings.kafka, 60)
        Lake.of(settings).ensure()
        generate = ["-m", "tests.chaos.generator", *config, "--journal", str(self.journal)]
        curate = Fleet(["-m", "flows.curate", *config], folder / "curate.log", processes, environment=environment)
        name = "curate" if processes == 1 else f"curate, one of {processes}"
        self.curate = Victim(name, curate, self.rows)
        self.producer = Victim("producer", Fleet(generate, folder / "producer.log"), self.made)

    def settle(self) -> Verdict:
        """Drain the producer, let everything reach the lake, end the flow, and judge."""
        self.producer.fleet.stop()
        self._wait_for_quiet()
        self.curate.fleet.stop()
        return judge_stream(self.settings, self.journal)

    def close(self) -> None:
        """End what is left."""
        self.producer.fleet.kill()
        self.curate.fleet.kill()

    def rows(self) -> int:
        """Rows of the ledger, by the lake's log alone."""
        return DeltaTable(f"{self.settings.lake_uri}/ledger").count()

    def made(self) -> int:
        """Trajectories in the journal."""
        return len(list(record.read(self.journal))) if self.journal.exists() else 0

    def _wait_for_quiet(self) -> None:
        """Until all that was made is accounted for, or nothing moves any more: the judge says what is missing."""
        made, before, moved_at = self.made(), -1, time.monotonic()

        def is_over() -> bool:
            nonlocal before, moved_at
            if (now := accounted(self.settings)) != before:
                before, moved_at = now, time.monotonic()
            return now >= made or time.monotonic() - moved_at > self._quiet_s

        wait(is_over, SETTLE_S, "the last trajectories to reach the lake", every_s=1)


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
