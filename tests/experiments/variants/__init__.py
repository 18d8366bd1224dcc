"""The experiments by name. A new one is a small file here and a line in `EXPERIMENTS`."""

from tests.experiments.arms import Experiment
from tests.experiments.variants.branches import BRANCHES
from tests.experiments.variants.eviction import EVICTION
from tests.experiments.variants.feedback import FEEDBACK
from tests.experiments.variants.hard_examples import HARD_EXAMPLES
from tests.experiments.variants.mini_batches import MINI_BATCHES
from tests.experiments.variants.process_rewards import PROCESS_REWARDS
from tests.experiments.variants.smollm2 import SMOLLM2
from tests.experiments.variants.staleness import STALENESS
from tests.experiments.variants.turn_credit import TURN_CREDIT

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        STALENESS,
        SMOLLM2,
        MINI_BATCHES,
        HARD_EXAMPLES,
        EVICTION,
        TURN_CREDIT,
        BRANCHES,
        PROCESS_REWARDS,
        FEEDBACK,
    )
}
