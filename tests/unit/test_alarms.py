"""Alarms on planted figures: each begins when it should, once, and ends."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from infra.telemetry import Telemetry, logger
from schemas.settings import load
from trainers.alarms import RULES, STATES, WINDOW, Alarms
from trainers.reports import Reports

SOUND = {
    "importance_ratio_max": 1.5,
    "effective_sample_ratio": 0.9,
    "process_factor": 0.1,
    "process_reward_mean": 0.5,
    "reward_mean": 0.5,
    "entropy": 1.0,
    "tokens_per_trajectory": 100.0,
    "produced_length": 105.0,
    "dropped_length": 130.0,
}
Steps = Sequence[Mapping[str, float]]


def steps(count: int = WINDOW, **changes: float) -> Steps:
    """Sound figures but for `changes`, with a little noise."""
    noise = [1.0 + 0.01 * (i % 3 - 1) for i in range(count)]
    return [{name: value * noise[i] for name, value in (SOUND | changes).items()} for i in range(count)]


def after(*parts: Steps) -> Alarms:
    alarms = Alarms(logger("learner"))
    for figures in (step for part in parts for step in part):
        alarms.step(figures)
    return alarms


def gauge(name: str) -> float | None:
    return REGISTRY.get_sample_value("lagoon_learner_alarm", {"name": name})


def test_a_sound_run_raises_no_alarm() -> None:
    assert not after(steps(5 * WINDOW)).onsets


def test_process_reward_that_rises_while_outcomes_fall_is_reward_hacking() -> None:
    hacked = after(steps(), steps(process_reward_mean=0.8, reward_mean=0.2))
    assert list(hacked.active) == ["reward_hacking"]
    assert gauge("reward_hacking") == 1.0
    assert not after(steps(), steps(process_reward_mean=0.8, reward_mean=0.7)).onsets
    assert not after(steps(), steps(process_reward_mean=0.2, reward_mean=0.2)).onsets


def test_process_rewards_that_are_not_trained_on_cannot_be_hacked() -> None:
    hacked = steps(process_factor=0.0, process_reward_mean=0.8, reward_mean=0.2)
    assert not after(steps(process_factor=0.0), hacked).onsets


def test_a_change_within_the_noise_is_no_news() -> None:
    noisy = [{**step, "process_reward_mean": 0.5 + 0.3 * (i % 2), "reward_mean": 0.5 - 0.3 * (i % 3 == 0)}
             for i, step in enumerate(steps(2 * WINDOW))]  # fmt: skip
    assert not after(noisy).onsets


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("importance_ratio", {"importance_ratio_max": 12.5}),
        ("effective_samples", {"effective_sample_ratio": 0.2}),
        ("entropy_collapse", {"entropy": 0.05}),
        ("length_growth", {"tokens_per_trajectory": 150.0}),
        ("length_bias", {"produced_length": 180.0, "dropped_length": 300.0}),
    ],
)
def test_each_alarm_is_told_once_until_it_is_over_and_then_anew(name: str, changes: dict[str, float]) -> None:
    bad, sound = steps(2 * WINDOW, **changes), steps(3 * WINDOW)
    alarms = after(steps(), bad)
    assert alarms.onsets == {name: 1}
    for figures in sound:
        alarms.step(figures)
    assert (alarms.active, gauge(name)) == ({}, 0.0)
    for figures in bad:
        alarms.step(figures)
    assert alarms.onsets == {name: 2}


def test_length_bias_says_how_long_what_was_trained_produced_and_dropped_is() -> None:
    biased = steps(WINDOW, tokens_per_trajectory=60.0, produced_length=100.0, dropped_length=190.0)
    assert after(biased).active == {
        "length_bias": "60 action tokens in a trajectory that was trained on, 100 in one that was produced, 190 in one "
        "that was dropped, over 10 steps"
    }


def test_lengths_that_differ_by_less_than_a_fifth_or_by_chance_are_no_bias() -> None:
    assert not after(steps(3 * WINDOW, tokens_per_trajectory=85.0)).onsets
    noisy = [{**step, "produced_length": 400.0 if i == 7 else 100.0} for i, step in enumerate(steps(2 * WINDOW))]
    assert not after([{**step, "tokens_per_trajectory": 95.0} for step in noisy]).onsets


def test_levels_themselves_are_within_bounds() -> None:
    alarms = Alarms(logger("learner"))
    alarms.step(SOUND | {"importance_ratio_max": 10.0, "effective_sample_ratio": 0.3})
    assert not alarms.onsets


def test_longer_trajectories_that_earn_more_are_no_bias() -> None:
    assert not after(steps(), steps(tokens_per_trajectory=150.0, reward_mean=0.7)).onsets


def test_states_begin_and_end_when_they_are_told() -> None:
    alarms = Alarms(logger("learner"))
    for reason in ("empty", "empty still", "", "empty again"):
        alarms.state("empty_buffer", reason)
    assert alarms.onsets == {"empty_buffer": 2}
    assert alarms.active == {"empty_buffer": "empty again"}


def test_every_alarm_says_what_to_do() -> None:
    planted = {
        "importance_ratio",
        "effective_samples",
        "policy_lag",
        "empty_buffer",
        "no_new_weights",
        "entropy_collapse",
    }
    planted |= {"reward_hacking", "length_bias", "length_growth"}
    advice = {name: rule.advice for name, rule in RULES.items()} | STATES
    assert set(advice) == planted
    assert all(advice.values())


class Watched:
    """A learner's reports on a clock of the test's own, without Kafka."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.now, self.version, self.newest_version = 1000.0, 1, 1
        self.num_available = self.num_consumed = 0
        self.dropped: dict[str, int] = {}
        monkeypatch.setattr("trainers.reports.time.monotonic", lambda: self.now)
        settings = load(overrides=[f"--run.data_dir={tmp_path}", "--learner.watchdog_s=10", "--loop.max_staleness=3"])
        self._telemetry = Telemetry(settings, "learner", "test")
        self.reports = Reports(settings, self._telemetry, Sink(), 1)  # pyright: ignore[reportArgumentType]

    def tick(self, seconds: float) -> Counter[str]:
        """How often each alarm has begun, `seconds` later."""
        self.now += seconds
        self.reports.tick(self, 1, self.version)  # pyright: ignore[reportArgumentType]
        return self.reports.alarms.onsets

    def close(self) -> None:
        self._telemetry.close()


class Sink:
    """A producer that keeps nothing."""

    def send(self, *args: object, **more: object) -> None: ...
    def poll(self) -> None: ...


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Watched]:
    made = Watched(monkeypatch, tmp_path)
    yield made
    made.close()


def test_services_that_keep_old_weights_are_told_once_until_they_follow(watched: Watched) -> None:
    assert not watched.tick(1)
    watched.version = 5  # the newest row is of version 1: 4 behind, 3 allowed
    watched.reports.published()
    assert watched.tick(1) == watched.tick(1) == {"policy_lag": 1}
    watched.newest_version = 4
    watched.tick(1)
    assert watched.reports.alarms.active == {}


def test_weights_that_do_not_come_are_told_once_until_they_do(watched: Watched) -> None:
    # five watchdog limits of 10 s; steps so far were short
    assert not watched.tick(49)
    assert watched.tick(2) == watched.tick(10) == {"no_new_weights": 1}
    assert watched.reports.alarms.active == {"no_new_weights": "no weight version was published for 61 s"}
    watched.reports.published()
    watched.tick(1)
    assert watched.reports.alarms.active == {}


def test_an_empty_buffer_is_told_once_until_there_is_a_batch(watched: Watched) -> None:
    for ok in (False, False, True, False):
        watched.reports.health(ok, "" if ok else "buffer empty (0 of 8 trajectories)")
    assert watched.reports.alarms.onsets == {"empty_buffer": 2}
