"""An evaluator that hangs slows nothing, and takes up its work where the others have come to meanwhile."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inference.tokenizer import make_tokenizer, save_tokenizer
from infra.kafka import Follower
from infra.stack import health
from infra.stack.programs import ROOT
from infra.weights import WeightStore
from schemas.messages import EvalResult
from schemas.settings import Kafka, Settings
from schemas.topics import EVALS
from tests.integration.test_dispatch_kafka import Tasks, dispatching
from tests.integration.test_learner import LIMIT_S, begin, check_each_row_was_trained_once, end, prepare

STEPS, VERSIONS = 6, 3


@contextmanager
def evaluating(saved: Path, folder: Path) -> Generator[subprocess.Popen[bytes]]:
    """`python -m inference.evaluate` as a process of its own, dead at the end."""
    command = [sys.executable, "-m", "inference.evaluate", "--config", str(saved)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LAGOON_INSTANCE": "evaluator-0"}
    with open(folder / "evaluator.log", "ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {LIMIT_S} s"
        time.sleep(0.1)


def with_tasks(settings: Settings) -> Settings:
    """`settings` with a family to deal and evaluate, saved where `begin` looks for them."""
    changes = {
        "families": [{"name": "add", "num_tasks": 10}],
        "dispatch": {"updates_ahead": 20},  # beyond what the learner has still to train on
        "evaluator": {"samples_per_family": 2, "full_samples_per_family": 4, "full_every": 3},
        "rollout": {"max_tokens": 200, "max_turns": 2, "max_turn_tokens": 8},
    }
    return Settings.model_validate(settings.model_dump() | changes)


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_evaluator_that_hangs_slows_neither_dispatch_nor_learner(tmp_path: Path, kafka: Kafka) -> None:
    settings, saved = with_tasks(prepare(tmp_path, kafka, STEPS)), tmp_path / "settings.json"
    settings.save(saved)
    save_tokenizer(make_tokenizer(["add 1 2 3"]), tmp_path / "start")
    tasks, address = Tasks(kafka), settings.run.folder / "services" / "evaluator-evaluator-0.json"
    with evaluating(saved, tmp_path) as evaluator:
        until(lambda: health.at(address).ok, "evaluator")
        evaluator.send_signal(signal.SIGSTOP)
        with dispatching(saved):
            end(begin(tmp_path), tmp_path)
            until(lambda: bool(tasks.read()), "tasks")
        check_each_row_was_trained_once(settings, STEPS)
        assert WeightStore.of(settings).versions() == list(range(1, VERSIONS + 1))
        follower = Follower(kafka, EVALS.name, EvalResult, "test")
        results = list(follower.poll())
        assert results == []
        evaluator.send_signal(signal.SIGCONT)
        until(lambda: len(results.extend(follower.poll()) or results) == 4, "results")
        evaluator.send_signal(signal.SIGTERM)
        assert evaluator.wait(60) == 0
    follower.close()
    found = {(r.requested_version, r.kind): r.num_scored + r.num_unscored for r in results}
    assert found == {(1, "skipped"): 0, (2, "skipped"): 0, (3, "light"): 2, (3, "full"): 4}
