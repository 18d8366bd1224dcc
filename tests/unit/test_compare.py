"""`lagoon compare`: figures of small lakes by hand, and two runs held against each other."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from infra.cli.compare import bound, settings_of_twin, table
from infra.compare import figures, reached, score_at, versus
from infra.lake import Lake
from schemas.errors import SettingsError
from schemas.settings import Settings
from tests.rows import AT
from tests.unit.test_views import ask, fill, outcome


def after(seconds: float) -> Any:
    return AT + timedelta(seconds=seconds)


def step(number: int, finished: float, wait_s: float) -> dict[str, Any]:
    """A step of 8 trajectories that are worth 4."""
    row = {"step": number, "incarnation": "i", "incarnation_at": AT, "finished_at": after(finished), "wait_s": wait_s}
    return row | {"num_trajectories": 8, "effective_sample_size": 4.0}


def score(version: int, value: float | None, count: int) -> dict[str, Any]:
    return {"eval_id": f"{version}/{value}", "end_version": version, "score": value, "num_scored": count}


def interval(phase: str, start: float, end: float, busy_s: float, idle_s: float) -> dict[str, Any]:
    times = {"started_at": after(start), "ended_at": after(end)}
    return {"interval_id": f"{phase}/{start}", "phase": phase, "busy_s": busy_s, "idle_s": idle_s, **times}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of a run of three steps, which the first group opened at AT began and which ended 30 s later."""
    made = Settings.model_validate({"run": {"name": "r", "data_dir": str(tmp_path)}})
    lake = Lake.of(made)
    lake.ensure()
    fill(lake, "dispatches", {"group_id": "a", "event": "opened", "at": AT})
    fill(lake, "dispatches", {"group_id": "a", "event": "reissued", "at": after(-60)})
    fill(lake, "train_steps", step(1, 10, 8), step(2, 20, 7), step(3, 30, 6))
    for version, created in ((1, -5), (2, 11), (3, 21), (4, 31)):
        fill(lake, "weights", {"version": version, "train_step": version - 1, "created_at": after(created)})
    fill(lake, "weights", {"version": 4, "train_step": 3, "created_at": after(90)})  # told once more
    fill(lake, "evals", score(1, 0.2, 10), score(2, 0.4, 10), score(3, None, 0), score(4, 0.6, 30), score(4, 0.8, 10))
    fill(lake, "groups", {"group_id": "a"})
    fill(lake, "ledger", *(outcome(n, "admitted") for n in range(24)))
    fill(
        lake,
        "usage",
        interval("rollout", -2, 2, 1, 3),
        interval("rollout", 10, 12, 2, 0),
        interval("rollout", 40, 42, 2, 0),
        interval("train", 29, 31, 2, 0),
        {"interval_id": "x", "phase": "rollout", "outbox": "o", "produced_trajectories": 24, "produced_tokens": 240},
    )
    return made


def test_the_pace_leaves_out_the_first_step_and_counts_what_is_not_waiting_as_training(settings: Settings) -> None:
    """Steps of 10 s: of the second 7 were waiting, of the third 6."""
    query = "SELECT num_steps, num_samples, elapsed_s, wait_s, train_s FROM pace"
    assert ask(Lake.of(settings), query) == [(3, 24, 30.0, 6.5, 3.5)]


def test_busy_shares_are_of_the_time_between_the_first_group_and_the_last_step(settings: Settings) -> None:
    """Rollouts: half of (1, 3), all of (2, 0): 2.5 of 4 seconds. The learner: half of (2, 0)."""
    query = "SELECT phase, busy_s, idle_s, busy_share FROM busy_shares WHERE busy_s IS NOT NULL"
    assert ask(Lake.of(settings), query) == [("rollout", 2.5, 1.5, 0.625), ("train", 1.0, 0.0, 1.0)]


def test_the_learning_curve_has_every_scored_version_once(settings: Settings) -> None:
    """Version 4 was scored twice: (0.6 * 30 + 0.8 * 10) / 40 = 0.65."""
    found = ask(Lake.of(settings), "SELECT * FROM learning_curve")
    assert [row[:4] for row in found] == [(1, 0, 0, 0.0), (2, 1, 8, 11.0), (4, 3, 24, 31.0)]
    assert [row[4:] for row in found] == [(0.2, 10), (0.4, 10), (pytest.approx(0.65), 40)]


def test_the_figures_of_a_run(settings: Settings) -> None:
    found = figures(settings)
    assert found["balanced"]
    assert (found["num_steps"], found["elapsed_s"], found["ended"]) == (3, 30.0, "")
    assert found["effective_samples"] == 12
    assert found["effective_sample_ratio"] == 0.5
    assert found["cost_per_effective_sample"] == pytest.approx((2.5 + 1.5 + 1.0) / 3600 * 2.0 / 12)
    assert found["busy_share"]["rollout"] == 0.625
    assert len(found["curve"]) == 3


def test_a_run_without_a_step_has_figures_and_nothing_to_compare(tmp_path: Path) -> None:
    empty = figures(Settings.model_validate({"run": {"name": "none", "data_dir": str(tmp_path)}}))
    assert (empty["num_steps"], empty["curve"], empty["wait_s"]) == (0, [], None)
    twins = {"async": empty, "sync": empty}
    assert versus(twins) == {}
    made = {"round": 1, "seed": 0, **twins, "versus": {}}
    assert "nothing to compare" in bound(made)
    assert table([made]).row_count > 5


CURVE = [
    {"num_samples": 0, "elapsed_s": 0.0, "score": 0.2, "num_scored": 10},
    {"num_samples": 8, "elapsed_s": 11.0, "score": 0.4, "num_scored": 10},
    {"num_samples": 20, "elapsed_s": 25.0, "score": 0.5, "num_scored": 10},
    {"num_samples": 24, "elapsed_s": 31.0, "score": 0.7, "num_scored": 30},
]


def test_a_score_at_some_samples_is_over_all_episodes_of_the_last_quarter_before() -> None:
    assert score_at(CURVE, "num_samples", 24) == pytest.approx((0.5 * 10 + 0.7 * 30) / 40)  # above 18
    assert score_at(CURVE, "num_samples", 8) == 0.4
    assert score_at(CURVE, "num_samples", 7) == 0.2  # none above 5.25: the last one before
    assert score_at(CURVE, "elapsed_s", 30) == 0.5


def test_a_score_is_reached_when_the_mean_of_its_window_is() -> None:
    assert reached(CURVE, 0.5) == 25.0
    assert reached(CURVE, 0.6) == 31.0  # (0.5 * 10 + 0.7 * 30) / 40 = 0.65
    assert reached(CURVE, 0.66) is None


def twin(pace: float, scores: list[float], wait_s: float, train_s: float) -> dict[str, Any]:
    """A run that trains 8 samples in `pace` seconds, and scores every version of 10 episodes."""
    curve = [
        {"num_samples": 8 * n, "elapsed_s": pace * n, "score": value, "num_scored": 10}
        for n, value in enumerate(scores)
    ]
    return {"curve": curve, "wait_s": wait_s, "train_s": train_s}


def test_twins_are_compared_at_equal_samples_at_equal_time_and_at_the_same_score() -> None:
    """Windows of equal samples (24): above 18, so the last version; of equal time (12 s): above 9."""
    seen = versus(
        {"async": twin(4, [0.1, 0.3, 0.4, 0.5, 0.8], 1, 3), "sync": twin(10, [0.1, 0.4, 0.4, 0.6], wait_s=8, train_s=2)}
    )
    assert seen["num_samples"] == 24
    assert seen["score_at_samples"] == {"async": 0.5, "sync": 0.6}
    assert seen["elapsed_at_samples_s"] == {"async": 12.0, "sync": 30.0}
    assert seen["elapsed_s"] == 16
    assert seen["score_at_time"] == {"async": 0.8, "sync": 0.4}
    assert seen["target_score"] == 0.5
    assert seen["elapsed_at_score_s"] == {"async": 12.0, "sync": 30.0}
    assert seen["step_ratio"] == pytest.approx(4 / 10)
    assert seen["bound"] == 0.8  # max(8, 2) / (8 + 2)
    assert seen["of_bound"] == pytest.approx(0.5)


def test_twins_differ_in_their_mode_and_in_what_it_needs_alone() -> None:
    given = ["--run.seed=3", "--loop.max_staleness=8", "--weights.uri=s3://b/w/", "--kafka.topic_prefix=p."]
    twins = {mode: settings_of_twin([], given, mode, 1, f"c-{mode}") for mode in ("async", "sync")}
    both = {mode: s.model_dump(exclude={"run": {"name"}}) for mode, s in twins.items()}
    differing = {
        f"{section}.{key}"
        for section, values in both["async"].items()
        if isinstance(values, dict)
        for key in values
        if values[key] != both["sync"][section][key]
    }
    assert differing == {"loop.mode", "loop.max_staleness", "weights.uri", "kafka.topic_prefix"}
    assert twins["async"].loop.max_staleness == 8
    assert {s.run.seed for s in twins.values()} == {4}
    assert twins["sync"].weights.uri == "s3://b/w/c-sync"
    assert twins["sync"].kafka.topic_prefix == "p.c-sync."
    assert any(family.options.get("tool_seconds") for family in twins["sync"].families)


def test_settings_that_contradict_a_mode_end_the_command_before_anything_runs() -> None:
    with pytest.raises(SettingsError, match=r"curate\.capacity"):
        settings_of_twin([], ["--curate.capacity=1024"], "sync", 0, "c")
