"""Four optimizer steps a version: the policy leaves the version published last, and samples are eight steps old."""

from tests.experiments.arms import Arm, Experiment
from tests.experiments.variants.staleness import OBJECTIVES

STEPS, LAG = 4, 2

MINI_BATCHES = Experiment(
    "mini_batches",
    "Four optimizer steps a version, samples two versions old: does it take a clip, and against which policy?",
    [
        Arm("clipped, k=0", OBJECTIVES["clipped"], mini_batches=STEPS),
        *(Arm(f"{name}, k={LAG}", settings, LAG, mini_batches=STEPS) for name, settings in OBJECTIVES.items()),
    ],
    settings={"loop.batch_size": 8},  # of 64 episodes some 30 are admitted
    shown=["clip_ratio", "effective_sample_ratio"],
)
