"""Credit by turn with a value head, against the outcome alone."""

from tests.experiments.arms import Arm, Experiment

TURN_CREDIT = Experiment(
    "turn_credit",
    "Does credit by turn teach more from the same samples than the outcome alone?",
    [
        Arm("outcome only", {"credit.baseline": "group"}),
        Arm("siblings at the same turn", {"credit.baseline": "turn_group"}),
        Arm("GAE with value head", {"credit.baseline": "value"}),
    ],
)
