"""Alarms on planted figures: each begins when it should, once, and ends."""

from collections.abc import Mapping, Sequence

import pytest
from prometheus_client import REGISTRY

from infra.telemetry import logger
from trainers.alarms import WINDOW, Alarms

SOUND = {
    "importance_ratio_max": 1.5,
    "effective_sample_ratio": 0.9,
    "process_factor": 0.1,
    "process_reward_mean": 0.5,
    "reward_mean": 0.5,
    "entropy": 1.0,
    "tokens_per_trajectory": 100.0,
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
        ("length_bias", {"tokens_per_trajectory": 150.0}),
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
