"""A stretch of flipped rewards, with and without the evaluator's orders."""

from tests.experiments.arms import Arm, Experiment

BAD = (0.3, 0.5)

FEEDBACK = Experiment(
    "feedback",
    "For a fifth of the run all rewards are flipped: does the evaluator's feedback limit the damage?",
    [
        Arm("feedback off", flipped=BAD, lag=1),
        Arm("feedback on", flipped=BAD, lag=1, steered=True),
        Arm("sound data", lag=1),
    ],
    settings={"evaluator.samples_per_family": 40},
    score_every=4,
    shown=["learning_rate_scale"],
)
