"""What a full buffer drops: the samples of least priority, or those that came first."""

from tests.experiments.arms import Arm, Experiment

EVICTION = Experiment(
    "eviction",
    "Samples come in bursts that are larger than the buffer: is it better to keep those of high priority?",
    [
        Arm("fifo", {"curate.eviction": "fifo"}, burst=8),
        Arm("reward_priority", {"curate.eviction": "reward_priority"}, burst=8),
    ],
    # a burst of 512 episodes leaves some 300 admitted; the buffer keeps 128, eight batches of 16
    settings={"loop.batch_size": 16, "curate.capacity": 128, "loop.max_staleness": 8},
    shown=["admitted_ratio"],
)
