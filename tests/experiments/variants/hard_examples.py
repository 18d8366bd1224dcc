"""Draws that follow the difficulty of tasks, against draws that ignore it."""

from tests.experiments.arms import Arm, Experiment

FAMILIES = ("add", "muladd", "chain", "larger", "flaky", "secret")
"""Ten tasks of each are trained on, so that a posterior sees each often enough; scores are of the usual held-out."""

HARD_EXAMPLES = Experiment(
    "hard_examples",
    "Does a policy learn more from the same samples if hard tasks are drawn more often than mastered ones?",
    [
        Arm("uniform draw", {"dispatch.exploration": 1.0}),
        Arm("posterior draw", {"dispatch.exploration": 0.1}),
        Arm(
            "posterior draw, long memory",
            {
                "dispatch.exploration": 0.1,
                "curate.posterior_discount": 0.98,
                "curate.hopeless_below": 0.12,
                "curate.mastered_above": 0.88,
            },
        ),
    ],
    settings={"families": [{"name": name, "num_tasks": 200, "held_out_ratio": 0.95} for name in FAMILIES]},
    shown=["admitted_ratio"],
)
