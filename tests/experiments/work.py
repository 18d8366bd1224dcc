"""Runs that are not finished yet, each in one thread, into the table as they end."""

import asyncio
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import torch

from infra.stack.policy import prepare_policy
from tests.experiments.arms import Plan, settings_of
from tests.experiments.loop import play_out
from tests.experiments.results import Measure, Results
from trainers.ranks import Ranks, prepare_environment


def work(wanted: Sequence[Plan], results: Results, policy: Callable[[Plan], Path], jobs: int = 1) -> int:
    """Run what of `wanted` is not finished, each from its starting `policy`; returns how many runs that were."""
    finished = results.finished()
    waiting = [plan for plan in wanted if plan.key not in finished]
    done = len(wanted) - len(waiting)
    print(f"{done} of {len(wanted)} runs are finished", flush=True)
    began, code = time.monotonic(), version()
    pool = ThreadPoolExecutor(jobs)
    try:
        running = [pool.submit(apart, plan, policy) for plan in waiting]
        for number, ended in enumerate(as_completed(running), 1):
            plan, measures = ended.result()
            results.add(plan, measures, code)
            left_s = (time.monotonic() - began) / number * (len(waiting) - number)
            print(f"{done + number}/{len(wanted)}  {told(plan, measures)}; {left_s / 60:.0f} min left", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return len(waiting)


def apart(plan: Plan, policy: Callable[[Plan], Path]) -> tuple[Plan, list[Measure]]:
    """Run a plan in a process of its own: each joins a process group, and gives its memory back, 0.7 GB with SmolLM2.

    Not `max_tasks_per_child` of one pool, which can hang up to Python 3.14 (python/cpython#115634).
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        return alone.submit(one, plan, policy).result()


def one(plan: Plan, policy: Callable[[Plan], Path]) -> tuple[Plan, list[Measure]]:
    """Run a plan in this process, on one thread."""
    prepare_environment()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    return plan, asyncio.run(play_out(plan, Ranks(), policy(plan)))


def told(plan: Plan, measures: Sequence[Measure]) -> str:
    """A run in one line."""
    score = next(measure.value for measure in reversed(measures) if measure.metric == "score")
    name = f"{plan.experiment.name}: {plan.arm.name}, seed {plan.seed}"
    return f"{name}: score {score:.3f}, {measures[-1].wall_s:.0f} s"


def start(plan: Plan, data: Path) -> Path:
    """The policy that all arms with the seed of `plan` start from, made once."""
    settings = settings_of(plan.seed, {"run.data_dir": str(data)}, plan.experiment.base)
    return prepare_policy(settings, lambda line: print(f"    {line}", flush=True))


def version() -> str:
    """The commit that runs, marked if the tree differs from it."""
    said = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"
