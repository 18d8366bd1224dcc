"""What a full buffer drops: the groups of least priority, or those that came first."""

from tests.experiments.arms import Arm, Experiment

EVICTION = Experiment(
    "eviction",
    "Samples come in bursts that are larger than the buffer: is it better to keep those of high priority?",
    [
        Arm("fifo", {"curate.eviction": "fifo"}, burst=8),
        Arm("reward_priority", {"curate.eviction": "reward_priority"}, burst=8),
    ],
    # of 512 episodes some 300 are admitted; 128 stay, eight batches of 16, and are too old when the next burst comes
    settings={"loop.batch_size": 16, "curate.capacity": 128, "loop.max_staleness": 7},
    shown=["admitted_ratio"],
)
