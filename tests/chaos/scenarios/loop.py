"""`lagoon demo`, the whole loop: each of its processes, MLflow and the broker die in turn, at random moments."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from deltalake import DeltaTable

from infra.stack import health, programs
from infra.stack.bring_up import bring_up, take_down
from infra.stack.supervise import State, Supervisor
from schemas.errors import DeadlineError
from schemas.settings import Settings, load
from tests.chaos.judge import Verdict, judge_loop
from tests.chaos.processes import wait, waited
from tests.chaos.table import Row

VICTIMS = ("rollout-0", "curate", "learner", "evaluator", "dispatch", "records", programs.MLFLOW, programs.KAFKA)
NO_OUTPUT = ("evaluator", programs.MLFLOW)
"""Victims whose health is their progress: an evaluation takes long, and MLflow is only written to."""

START_S, RECOVERY_S, END_S = 900.0, 180.0, 600.0
LAST_STEPS = 12
"""Steps that the learner takes after the last kill."""

OVERRIDES = (
    "--learner.num_train_steps=1000000",
    "--policy.warm_start_steps=250",
    "--evaluator.samples_per_family=8",
    "--learner.sync_interval_start=2",
    "--learner.sync_interval=3",
)


def run(rounds: int, folder: Path) -> list[Row]:
    """A round kills each victim once."""
    return torment(rounds, folder)[1]


def torment(rounds: int, folder: Path, overrides: Sequence[str] = ()) -> tuple["Loop", list[Row]]:
    """The ended loop, a row for each victim, and one for what the judge finds, as no single victim is to blame."""
    loop = Loop(folder, overrides)
    try:
        loop.start()
        for number in range(rounds):
            for victim in random.sample(VICTIMS, len(VICTIMS)):
                loop.kill(victim)
            print(f"  loop: round {number + 1} of {rounds}, step {loop.steps()}", flush=True)
        loop.end()
    finally:
        loop.close()
    verdict = loop.judge()
    print(verdict.shown() or f"  loop: {loop.steps()} steps, every trajectory and every step explained", flush=True)
    return loop, [*loop.rows.values(), Row("loop as a whole").add(verdict)]


class Loop:
    """A demo that runs as long as it is wanted, and the kills of its processes."""

    def __init__(self, folder: Path, overrides: Sequence[str] = ()) -> None:
        self.data_dir, self.log = folder / "data", folder / "demo.log"
        self._overrides = [f"--run.data_dir={self.data_dir}", *OVERRIDES, *overrides]
        self.rows = {victim: Row(victim) for victim in VICTIMS}
        self._supervisor = Supervisor(self.data_dir)
        self._saved = self.data_dir / "current" / "settings.json"

    def start(self) -> None:
        """Start the demo, and wait until the learner takes steps."""
        with open(self.log, "wb") as output:
            command = [sys.executable, "-m", "infra.cli.main", "demo", *self._overrides]
            self._demo = subprocess.Popen(command, stdout=output, stderr=output, cwd=programs.ROOT)
        self._wait(self._saved.exists, START_S, "the run's settings")
        self.settings: Settings = load([self._saved])
        self._wait(lambda: self.steps() >= 3, START_S, "the first steps")

    def kill(self, victim: str) -> None:
        """Kill -9 `victim` at a random moment, and wait until it does its own work again."""
        time.sleep(random.uniform(0, 2))
        pid = self._strike(victim)
        died_at = time.monotonic()
        is_back = self._back(victim, pid)
        self._wait(is_back, RECOVERY_S, f"{victim} to go on after a kill")
        self.rows[victim].recoveries_s.append(time.monotonic() - died_at)
        self.rows[victim].kills += 1

    def end(self) -> None:
        """Let the learner finish soon: it dies once more, to read its settings anew. The demo then drains."""
        learner = self.settings.learner.model_copy(update={"num_train_steps": self.steps() + LAST_STEPS})
        self.settings = self.settings.model_copy(update={"learner": learner})
        self.settings.save(self._saved.resolve())
        self._strike("learner")
        self.rows["learner"].kills += 1
        if code := self._demo.wait(END_S):
            raise AssertionError(f"the demo ended with {code}: {self.tail()}")

    def close(self) -> None:
        """End what is left of the demo, and of its stack."""
        if self._demo.poll() is None:
            self._demo.send_signal(signal.SIGTERM)
            waited(lambda: self._demo.poll() is not None, END_S)
            self._demo.kill()
            self._demo.wait()
        take_down(str(self.data_dir), lambda _: None)

    def judge(self) -> Verdict:
        """The verdict; the broker is started once more, to read back what was sent."""
        try:
            bring_up(self.settings, [programs.KAFKA], lambda _: None)
            return judge_loop(self.settings)
        finally:
            take_down(str(self.data_dir), lambda _: None)

    def summary(self) -> dict[str, Any]:
        """What the demo wrote about itself."""
        return json.loads((self._saved.parent / "summary.json").read_text())

    def steps(self) -> int:
        """Rows of train_steps."""
        return self._count("train_steps")

    def tail(self) -> str:
        """The end of the demo's output."""
        return self.log.read_text(errors="replace")[-2000:]

    def _strike(self, victim: str) -> int:
        """Kill -9 the process of `victim` once it has one (0 would be our own process group); returns its pid."""
        pids: list[int] = []

        def runs() -> bool:
            pids.append(self._state(victim).pid)
            return pids[-1] > 0

        self._wait(runs, RECOVERY_S, f"{victim} to run")
        os.kill(pids[-1], signal.SIGKILL)
        return pids[-1]

    def _back(self, victim: str, dead: int) -> Callable[[], bool]:
        """Whether `victim` works again: its successor answers, and then more of what it makes appears."""
        tables = {"learner": "train_steps", "curate": "ledger", "dispatch": "dispatches", "records": "usage"}
        tables[programs.KAFKA] = "ledger"  # the last link of the chain that hangs on the broker
        before = -1

        def amount() -> int:
            if victim.startswith("rollout"):
                return self._sent()
            return self._count(tables[victim]) if victim in tables else 0

        def is_back() -> bool:
            nonlocal before
            if before < 0 and self._is_well(victim, dead):
                before = amount()
            return before >= 0 and (amount() > before or victim in NO_OUTPUT)

        return is_back

    def _is_well(self, victim: str, dead: int) -> bool:
        """Whether the successor of process `dead` answers; where an orphan might, the supervisor has to agree."""
        state = self._state(victim)
        answer = health.check(self.settings, state)
        is_there = state.pid not in {0, dead} and (state.name == "running" or victim not in NO_OUTPUT)
        return is_there and (answer.ok or answer.is_up)

    def _state(self, victim: str) -> State:
        return next(s for s in self._supervisor.states() if s.program == victim)

    def _count(self, table: str) -> int:
        return DeltaTable(f"{self.settings.lake_uri}/{table}").count()

    def _sent(self) -> int:
        kafka = self.settings.kafka
        consumer = Consumer({"bootstrap.servers": kafka.brokers, "group.id": "chaos-watch"})
        try:
            places = [TopicPartition(kafka.topic("trajectories"), p) for p in range(kafka.partitions)]
            return sum(consumer.get_watermark_offsets(place, timeout=10)[1] for place in places)
        finally:
            consumer.close()

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        def checked() -> bool:
            if self._demo.poll() is not None:
                raise AssertionError(f"the demo ended while waiting for {what}: {self.tail()}")
            return condition()

        try:
            wait(checked, timeout_s, what)
        except DeadlineError as error:
            raise AssertionError(f"{error}; the demo says: {self.tail()}") from error
