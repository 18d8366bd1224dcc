"""Experiments on the real agent, curation and DeepSpeed: into a lake, not run again, and drawn from it."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from inference import demonstrate
from infra.stack import policy
from tests.experiments.__main__ import unmet
from tests.experiments.arms import Arm, Experiment, Plan, plans, settings_of
from tests.experiments.findings import Findings
from tests.experiments.intervals import difference, mean
from tests.experiments.report import report
from tests.experiments.results import Results
from tests.experiments.variants import EXPERIMENTS
from tests.experiments.work import work
from trainers.warm_start import warm_start

LARGER = {"families": [{"name": "larger", "num_tasks": 20}]}
SIZES = {"evaluator.samples_per_family": 1, "evaluator.full_samples_per_family": 2}
STALE = {"objective.name": "ppo", "learner.lora_rank": 4}
EXPERIMENT = Experiment(
    "small",
    "Does it work?",
    [
        Arm("branches", {"credit.fork_budget": 0.5, "credit.fork_branches": 2}),
        Arm("stale", STALE, lag=1, flipped=(0.5, 1.0), steered=True),
    ],
    settings={**LARGER, **SIZES},
    seeds=1,
    updates=2,
    score_every=1,
    shown=["turns"],
)


def policy_in(folder: Path, plan: Plan) -> Path:
    """A policy that knows what an answer looks like, and guesses: groups do not agree. Notes which process asks."""
    (folder / f"asked-by-{os.getpid()}").touch()
    if not (folder / "policy").exists():
        settings = settings_of(plan.seed, {**LARGER, "policy.warm_start_steps": 100, "policy.warm_start_batch": 16})
        demonstrate.write(settings, folder / "shown")
        warm_start(settings, folder / "shown", folder / "policy")
    return folder / "policy"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_finished_runs_are_not_run_again_and_the_report_is_drawn_from_the_lake(tmp_path: Path) -> None:
    results, wanted = Results(tmp_path), list(plans([EXPERIMENT]))
    assert work(wanted, results, partial(policy_in, tmp_path)) == 2
    assert len(list(tmp_path.glob("asked-by-*"))) == 2  # a process for each run, whose memory ends with it
    rows = results.read()
    for arm in ("branches", "stale"):
        mine = rows.filter(pc.equal(rows["arm"], arm))
        scores = mine.filter(pc.equal(mine["metric"], "score")).sort_by("step")
        branches = mine.filter(pc.equal(mine["metric"], "branches")).sort_by("step")["value"].to_pylist()
        assert scores["step"].to_pylist() == [0, 1, 2]
        assert scores["samples"].to_pylist() == [64 * i + branches[i] for i in range(3)]  # branches are samples too
        assert (branches[-1] > 0) == (arm == "branches")
        assert mine.filter(pc.equal(mine["metric"], "effective_sample_ratio")).num_rows == 2, "no step was trained"
    assert work(wanted, results, partial(policy_in, tmp_path)) == 0
    assert DeltaTable(str(tmp_path / "experiments")).version() == 1  # one commit a run

    docs = tmp_path / "docs"
    report([EXPERIMENT], rows, docs)
    assert (docs / "results" / "small.png").read_bytes().startswith(b"\x89PNG")
    assert f"| stale | 1 | {_last_score(rows, 'stale'):.3f} |" in (docs / "results.md").read_text()


def test_other_settings_are_other_runs() -> None:
    (run, _), (longer, _) = plans([EXPERIMENT]), plans([replace(EXPERIMENT, updates=3)])
    assert run.fingerprint == next(plans([EXPERIMENT])).fingerprint
    assert run.fingerprint != longer.fingerprint


def test_without_its_policy_an_experiment_is_left_out_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "SMOLLM2_PACKAGES", ("gguf_of_nobody",))
    assert "`make smollm2`" in unmet(EXPERIMENTS["smollm2"], tmp_path)
    assert not unmet(EXPERIMENTS["staleness"], tmp_path)


def test_an_interval_over_seeds_is_students() -> None:
    found = mean([0.1, 0.2, 0.3])  # s = 0.1, t(0.975, 2) = 4.3027: 4.3027 * 0.1 / sqrt(3) = 0.2484
    assert found == pytest.approx((0.2, 0.2484, 3), abs=1e-4)
    paired = difference({0: 0.5, 1: 0.9, 2: 0.7}, {0: 0.4, 1: 0.8, 3: 0.0})  # seeds 0 and 1 have both
    assert paired == pytest.approx((0.1, 0.0, 2))


def test_runs_whose_samples_differ_are_compared_evaluation_by_evaluation() -> None:
    curves = [[(0, 0.1), (100, 0.2), (200, 0.3)], [(0, 0.1), (140, 0.4), (240, 0.5)]]
    marked = Experiment("marked", "?", [Arm("a")], marked=0.25)
    found = Findings(marked, {"a": {seed: {"score": points} for seed, points in enumerate(curves)}})
    assert [(samples, score.mean) for samples, score in found.curve("a")] == [
        (0, pytest.approx(0.1)),
        (120, pytest.approx(0.3)),
        (220, pytest.approx(0.4)),
    ]
    assert found.mark("a").mean == pytest.approx(0.3)  # a quarter is 50 and 60 samples: 0.2 and 0.4


def _last_score(rows: pa.Table, arm: str) -> float:
    return next(
        row["value"]
        for row in rows.sort_by([("step", "descending")]).to_pylist()
        if row["arm"] == arm and row["metric"] == "score"
    )
