"""Staleness once more, with a language model of 135 million parameters and adapters of low rank."""

from tests.experiments.arms import BASE, Arm, Experiment
from tests.experiments.variants.staleness import OBJECTIVES, ON_POLICY

LAG = 4

ARMS = [ON_POLICY, *(Arm(f"{name}, k={LAG}", settings, LAG) for name, settings in OBJECTIVES.items())]

SMOLLM2 = Experiment(
    "smollm2",
    "SmolLM2-135M with LoRA: does it learn as well from samples that are k versions old?",
    ARMS,
    base=BASE.with_name("smollm2.toml"),
    seeds=3,
    updates=20,
    score_every=5,
    shown=["effective_sample_ratio", "entropy"],
    quick={
        "seeds": 1,
        "updates": 2,
        "arms": ARMS[:2],
        "settings": {"evaluator.samples_per_family": 16, "evaluator.full_samples_per_family": 32},
    },
)
