"""Sections: dispatch, curation, rollouts, learner, evaluator, and what they agree on."""

from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.settings.base import Positive, Ratio, Seconds, Section


class Loop(Section):
    """What the three loops agree on."""

    mode: Literal["async", "sync"] = "async"
    """sync: sample one batch with the newest weights, train one step on it, publish, and only then sample again."""
    max_staleness: int = Field(default=3, ge=0)
    bucket_width: Positive = 1
    group_size: int = Field(default=16, ge=1, le=1024)
    batch_size: Positive = 128
    success_reward: float = 1.0


class Dispatch(Section):
    """Which task next, and how many groups are open."""

    updates_ahead: float = Field(default=2.5, gt=0)
    """Batches between what the learner can still use and what is under way; in mode sync it is one."""
    lease_s: Seconds = 120
    max_attempts: Positive = 3
    tick_s: Seconds = 0.5
    exploration: Ratio = 0.1
    """Share of draws that ignore difficulty, so that no task starves."""


class Curate(Section):
    """Curation: groups, staleness, priority, eviction."""

    capacity: Positive = 4096
    """Live trajectories over all shards; a shard keeps its last group, however large."""
    eviction: Literal["reward_priority", "fifo", "stalest_first"] = "reward_priority"
    """Which group a full shard drops: of the least mean priority, the first that came, or of the oldest weights."""
    max_evicted_share: Ratio = 0.5
    """Part of a version bucket's trajectories that eviction may take, as long as another bucket can pay."""
    group_timeout_s: Seconds = 60
    epoch_s: Seconds = 1
    epoch_bytes: Positive = 64 * 1024 * 1024
    posterior_discount: Ratio = 0.9
    """Weight that a posterior keeps per weight version."""
    hard_below: Ratio = 0.4
    hopeless_below: Ratio = 0.05
    mastered_above: Ratio = 0.95
    hard_bonus: float = Field(default=0.25, ge=0)
    freshness_weight: float = Field(default=0.25, ge=0)
    completion_bonus: float = Field(default=0.1, ge=0)
    skip_expired_offsets: bool = False
    """Go on after offsets that have expired; the hole becomes a row in dead_letters."""

    @model_validator(mode="after")
    def _ordered(self) -> "Curate":
        if not self.hopeless_below < self.hard_below < self.mastered_above:
            raise ValueError(
                f"expected hopeless_below < hard_below < mastered_above, "
                f"got {self.hopeless_below}, {self.hard_below}, {self.mastered_above}"
            )
        return self


class Rollout(Section):
    """A rollout service."""

    engine: Literal["torch", "vllm"] = "torch"
    max_episodes: Positive = 128
    token_budget: Positive = 262_144
    """Context and tokens to be sampled of the requests in the engine at once; more wait, and no tasks are pulled."""
    max_turns: Positive = 6
    max_turn_tokens: Positive = 24
    max_tokens: Positive = 480
    temperature: float = Field(default=1.0, ge=0)
    stale_in_flight: Literal["abort", "continue"] = "abort"
    """What becomes of an episode whose oldest token comes to lag by more than loop.max_staleness: it is stopped and
    kept as failed, or it goes on, its reward counts in its group's baseline, and its tokens are not trained on."""
    episode_timeout_s: Seconds = 60
    tool_timeout_s: Seconds = 2
    pack_linger_s: Seconds = 0.5
    outbox_bytes: Positive = 256 * 1024 * 1024
    """Above this an outbox takes no new tasks until Kafka has taken some."""
    drain_s: Seconds = 10
    services: Positive = 1
    threads: Positive = 1

    @model_validator(mode="before")
    @classmethod
    def _whole_distribution(cls, data: Any) -> Any:
        cut = sorted({"top_p", "top_k", "min_p"} & set(data)) if isinstance(data, dict) else []
        if cut:
            raise ValueError(
                f"rollout sets {cut}; tokens are sampled from the whole distribution, because an engine that cuts it "
                "renormalizes the logprobs and importance ratios are biased; use rollout.temperature"
            )
        return data


class Learner(Section):
    """The learner."""

    num_train_steps: Positive = 1000
    learning_rate: float = Field(default=1e-5, gt=0)
    warmup_steps: int = Field(default=5, ge=0)
    micro_batches: Positive = 4
    """Of each rank and step, of equally many rows."""
    micro_batch_tokens: int = Field(default=0, ge=0)
    """If above 0, most tokens of a micro-batch, padding included. There are as many as it takes, not micro_batches."""
    packing: bool = True
    """Lay rows end to end into lines as long as the longest row; none sees another. Refused where a policy cannot."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_uses: Positive = 1
    old_bucket_weight: Ratio = 0.05
    priority_exponent: float = Field(default=1.0, ge=0, le=10)
    """Inside a bucket groups are drawn with probability ~ priority to this power; 0: all alike."""
    sampling_correction: Ratio = 0.0
    """Trajectories weigh 1 / probability of their draw to this power, with a mean of 1; 0: all alike. 1: as if drawn
    alike from the whole buffer."""
    sync_interval_start: Positive = 5
    sync_interval: Positive = 20
    sync_anneal_steps: Positive = 200
    min_update_s: float = Field(default=0.0, ge=0)
    watchdog_s: Seconds = 120
    poll_s: Seconds = 0.1
    keep_checkpoints: int = Field(default=2, ge=1)
    checkpoints: str = ""
    """Folder of the checkpoints, for example on a disk that outlives this machine. Without it, in the run's folder."""
    precision: Literal["fp32", "bf16"] = "fp32"
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload_optimizer: bool = False
    """Keep the optimizer's state in the machine's memory and update there (ZeRO-Offload); from zero_stage 1 on."""
    lora_rank: int = Field(default=0, ge=0)
    """Above 0, only adapters of this rank are trained (LoRA) and, after version 1, published; readers merge them."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """An adapter's update is multiplied by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter."""
    activation_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass: a third more work, far less memory."""
    deepspeed: dict[str, Any] = {}
    """Passed through to DeepSpeed; keys that Lagoon owns are refused."""
    threads: Positive = 1

    @model_validator(mode="after")
    def _checks(self) -> "Learner":
        owned = {
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
            "optimizer",
            "zero_optimization",
            "bf16",
            "fp16",
        }
        taken = sorted(owned & set(self.deepspeed))
        if taken:
            raise ValueError(f"learner.deepspeed sets {taken}, which Lagoon derives from [learner]; remove them")
        if self.offload_optimizer and not self.zero_stage:
            raise ValueError(
                "offload_optimizer is on with zero_stage 0; offloading is part of ZeRO: set zero_stage 1, 2 or 3"
            )
        if self.sync_interval_start > self.sync_interval:
            raise ValueError(
                f"sync_interval_start {self.sync_interval_start} is above sync_interval {self.sync_interval}; "
                "publishing anneals from frequent to sparse"
            )
        return self


class Evaluator(Section):
    """The evaluator and curator."""

    engine: Literal["torch", "vllm"] = "torch"
    """Its own, whatever the rollouts use; a second one beside it while a full evaluation runs."""
    samples_per_family: Positive = 40
    full_samples_per_family: Positive = 160
    full_every: Positive = 25
    temperature: float = Field(default=1.0, ge=0)
    train_groups_per_family: int = Field(default=0, ge=0, le=1000)
    """Groups of training tasks that a light evaluation plays too: trained on (origin eval), and in no score."""
    max_unscored_ratio: Ratio = 0.1
    """More than this share unscored keeps a version from becoming champion."""
    fall_z: float = Field(default=2.0, gt=0)
    """Standard errors beyond which a fall is significant, one-sided: 2 allows 0.023 false alarms an evaluation."""
    learning_rate_scale: float = Field(default=0.5, gt=0, le=1)
    recent_bucket_weight: float = Field(default=4.0, ge=1)
    threads: Positive = 1


class Policy(Section):
    """The starting policy: `path` to a Hugging Face folder, or the one that `name` says."""

    path: str = ""
    name: Literal["tiny", "smollm2"] = "tiny"
    """A tiny Llama made here and warmed up, or SmolLM2-135M-Instruct, converted once (`make smollm2`)."""
    hidden: Positive = 64
    layers: Positive = 2
    intermediate: Positive = 192
    max_positions: Positive = 512
    warm_start_steps: int = Field(default=800, ge=0)
    warm_start_batch: Positive = 64
    warm_start_learning_rate: float = Field(default=3e-3, gt=0)
    warm_start_noise: Ratio = 0.5
