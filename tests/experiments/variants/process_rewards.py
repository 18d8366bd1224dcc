"""A task that a constant process reward spoils: valid calls pay, and an answer that does not come costs little."""

from tests.experiments.arms import Arm, Experiment

NEVER = 1_000_000

PROCESS_REWARDS = Experiment(
    "process_rewards",
    "Every valid call pays. Does the policy still answer, if that pay stays, and if it fades?",
    [
        Arm("none", {"credit.process_weight": 0.0}),
        Arm("fading", {"credit.process_weight": 0.5, "credit.process_anneal_steps": 20}),
        Arm("constant", {"credit.process_weight": 0.5, "credit.process_anneal_steps": NEVER}),
    ],
    settings={"credit.baseline": "turn_group"},
    shown=["turns", "process_reward"],
)
