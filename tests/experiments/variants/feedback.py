"""A stretch of flipped rewards, with and without the evaluator's orders."""

from tests.experiments.arms import Arm, Experiment

BAD = (0.25, 2 / 3)
"""Updates 12 to 32 of 48: a verifier that is wrong until somebody mends it."""

FEEDBACK = Experiment(
    "feedback",
    "For 20 of 48 updates all rewards are flipped: does the evaluator's feedback limit the damage?",
    [
        Arm("feedback off", flipped=BAD, lag=1),
        Arm("feedback on", flipped=BAD, lag=1, steered=True),
        Arm("sound data", lag=1),
        Arm("sound data, feedback on", lag=1, steered=True),
    ],
    settings={"evaluator.samples_per_family": 40},
    score_every=4,
    shown=["falls_answered", "learning_rate_scale"],
    marked=BAD[1],
)
