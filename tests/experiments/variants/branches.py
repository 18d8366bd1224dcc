"""A road on which one turn of five decides and the others are noise."""

from tests.experiments.arms import Arm, Experiment

DECISIVE = 2
ROAD = {
    "families": [
        {
            "name": "road",
            "environment": "tests.road:build_numbers",
            "num_tasks": 2000,
            "held_out_ratio": 0.5,
            "options": {"decisive": DECISIVE},
        }
    ],
    "evaluator.samples_per_family": 120,
    "evaluator.full_samples_per_family": 480,
}

BRANCHES = Experiment(
    "branches",
    "One turn decides and the others are noise: does credit find that turn, and is more learned from the same samples?",
    [
        Arm("outcome only"),
        Arm("outcome only, small batches", groups=3),
        Arm("outcome only, large batches", {"loop.batch_size": 192}, groups=22),
        Arm("GAE with value head", {"credit.baseline": "value"}),
        Arm("branches, budget 1", {"credit.fork_budget": 1.0, "credit.fork_branches": 2}),
        Arm("branches of every turn", {"credit.fork_budget": 16.0, "credit.fork_branches": 2}, groups=2),
        Arm(
            "one branch of every turn, small batches", {"credit.fork_budget": 16.0, "credit.fork_branches": 1}, groups=1
        ),
    ],
    settings=ROAD,
    scored=ROAD,
    updates=64,
    score_every=8,
    shown=["credit_of_decisive_turn", "updates", "branches"],
    by_samples=True,
)
