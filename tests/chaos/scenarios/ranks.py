"""A learner of two ranks under torchrun: one dies, the other has to end too, and both go on from the checkpoint."""

import os
import random
import signal
import time
from pathlib import Path

from deltalake import DeltaTable

from infra.lake import Lake
from infra.stack.programs import ROOT
from schemas.names import Event
from schemas.settings import Kafka, Settings
from tests.chaos.judge import judge_learner
from tests.chaos.processes import Fleet, wait
from tests.chaos.table import Row
from tests.conftest import running_broker
from tests.experience import leave
from tests.integration.test_learner import BATCH, prepare

STEPS_PER_LIFE = 8
STEP_S = 0.3
START_S, END_S = 240.0, 30.0
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=0")


def run(rounds: int, folder: Path) -> list[Row]:
    """A round kills one of the two ranks, the first or the second by chance."""
    with running_broker(folder) as address:
        steps = STEPS_PER_LIFE * (rounds + 1)
        settings = prepare(folder, Kafka(brokers=address, topic_prefix="chaos.", partitions=4), steps)
        names = [f"t{number:04d}" for number in range(steps * BATCH)]
        leave(Lake.of(settings), names, Event.ADMITTED, steps + 1)
        learner = Learner(settings, folder)
        try:
            for _ in range(rounds):
                learner.die()
            learner.live()
            wait(lambda: not learner.fleet.is_whole, START_S, "the learner to finish")
            learner.fleet.stop()
        finally:
            learner.close()
        verdict = judge_learner(settings, dict.fromkeys(names, 1), steps)
        print(verdict.shown() or f"  ranks: {steps} steps, each explained, none twice", flush=True)
        return [learner.row.add(verdict)]


class Learner:
    """The launcher with its two ranks."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.row = Row("learner, a rank of 2")
        script = [str(ROOT / "trainers" / "learn.py"), "--config", str(folder / "settings.json")]
        options = ["--learner.zero_stage=2", f"--learner.min_update_s={STEP_S}"]
        self.fleet = Fleet(
            [*LAUNCHER, *script, *options], folder / "learner.log", environment={"DS_ACCELERATOR": "cpu"}
        )
        self._table = f"{settings.lake_uri}/train_steps"
        self._died_at: float | None = None

    def live(self) -> None:
        """Start; returns once a step is done."""
        before = self._steps()
        self.fleet.start()
        wait(lambda: self._steps() > before or not self.fleet.is_whole, START_S, "a step of the learner")
        if self._died_at is not None:
            self.row.recoveries_s.append(time.monotonic() - self._died_at)

    def die(self) -> None:
        """A life that ends because one rank is killed."""
        self.live()
        time.sleep(random.uniform(0, STEPS_PER_LIFE * STEP_S / 2))
        ranks = self._ranks()
        os.kill(random.choice(ranks), signal.SIGKILL)
        self._died_at = time.monotonic()
        self.row.kills += 1
        wait(lambda: not any(map(_lives, ranks)) and not self.fleet.is_whole, END_S, "the other rank to end")
        self.fleet.kill()

    def close(self) -> None:
        """End what is left."""
        for rank in self._ranks():
            os.kill(rank, signal.SIGKILL)
        self.fleet.kill()

    def _ranks(self) -> list[int]:
        """Pids of the launcher's children that run the learner."""
        parents = {p.pid for p in self.fleet.processes}
        return [pid for pid in map(int, _numbers()) if _parent(pid) in parents and b"learn.py" in _read(pid, "cmdline")]

    def _steps(self) -> int:
        return DeltaTable(self._table).count()


def _numbers() -> list[str]:
    return [p.name for p in Path("/proc").glob("[0-9]*")]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # gone meanwhile
        return b""


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def _lives(pid: int) -> bool:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return bool(fields) and fields[0] != b"Z"
