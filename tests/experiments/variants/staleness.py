"""Every sample exactly k versions old, and three ways to correct for it."""

from tests.experiments.arms import Arm, Experiment

LAGS = (1, 2, 4, 8, 16)
OBJECTIVES = {
    "naive": {"objective.name": "reinforce", "objective.ratio_correction": "none"},
    "clipped": {"objective.name": "grpo"},
    "decoupled": {"objective.name": "ppo"},
}

ON_POLICY = Arm("on-policy, k=0", OBJECTIVES["clipped"])
"""The ratio is 1, and the gradient of all three the same."""

STALENESS = Experiment(
    "staleness",
    "Does a policy learn as well from samples that are k versions old, and does it take an importance ratio?",
    [ON_POLICY, *(Arm(f"{name}, k={lag}", settings, lag) for lag in LAGS for name, settings in OBJECTIVES.items())],
    shown=["effective_sample_ratio", "turns"],
)
