"""DeepSpeed around the policy: exact gradients of the global batch, whole weights, state on disk.

Gradients are sums over the action tokens of all ranks and micro-batches, divided once by their number. DeepSpeed would
divide again by the accumulation steps and by the ranks; `train_step` undoes both.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from schemas.errors import SettingsError
from schemas.messages import Probe
from schemas.settings import Settings
from trainers.batches import MicroBatch, Split
from trainers.critic import Critic
from trainers.lora import adapt, merged, put_in, switched_off, write_adapters
from trainers.metrics import COLUMNS, TurnMetrics, trajectory_sums
from trainers.objectives import ActionTokens, evaluate
from trainers.objectives.aggregate import AGGREGATIONS
from trainers.objectives.dpo import preferences
from trainers.policy import Scorer, check_packing, checkpoint_activations, in_float32, load_policy
from trainers.ranks import Ranks
from trainers.signals import Signals
from trainers.universal import universal
from trainers.value_head import ValueScorer

TAG = "deepspeed"
PROBE_TOKENS, PROBE_STRIDE = 32, 37
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of an optimizer step: `sums` [num_rows, len(COLUMNS)] of all ranks' trajectories.

    `grad_norm` is the norm before clipping, of the policy and, where there is one, its value head.
    """

    sums: NDArray[np.float64]
    grad_norm: float
    turns: TurnMetrics


class Engine:
    """The policy under DeepSpeed, on this rank. Every method is collective: all ranks call it alike."""

    def __init__(self, settings: Settings, ranks: Ranks, policy: Path, proximal: Path | None = None):
        """Load `policy`, `starting_policy(settings)` where the objective has a reference, and `proximal` for PPO.

        Raises:
            SettingsError: a policy that cannot be loaded, or settings that leave nothing to learn from.
        """
        if settings.rollout.temperature == 0:
            raise SettingsError("rollout.temperature is 0: greedy rollouts have no distribution to learn from")
        learner, self._options, credit = settings.learner, settings.objective, settings.credit
        torch.set_num_threads(learner.threads)
        torch.manual_seed(settings.run.seed)
        self._ranks = ranks
        self._stage = learner.zero_stage
        self._longest = settings.rollout.max_tokens
        parts = max(1, min(learner.micro_batches, settings.loop.batch_size // ranks.size))
        self.split = Split(parts, learner.micro_batch_tokens, learner.packing)
        self._lora_scale = learner.lora_alpha / learner.lora_rank if learner.lora_rank else None
        start = starting_policy(settings)
        is_kept = self._options.has_reference and self._lora_scale is None
        self._reference = _frozen(start, settings, ranks.device) if is_kept else None
        decoupled = "ppo" in self._options.names
        self._proximal = _frozen(proximal or policy, settings, ranks.device) if decoupled else None
        self.has_values = credit.baseline == "value"
        kind = ValueScorer if self.has_values else Scorer
        begin = policy if self._lora_scale is None else start  # adapters come with `restore`
        model = load_policy(begin, _DTYPES[learner.precision])
        if self._lora_scale is not None:
            adapt(model, learner)
        scorer = kind(model, settings.rollout.temperature)
        self._deepspeed = _deepspeed()
        if learner.packing:
            check_packing(scorer)
        if learner.activation_checkpointing:
            checkpoint_activations(scorer.model)
        config = deepspeed_config(settings, parts, ranks.size)
        groups, self._rates = _parameter_groups(scorer, settings)
        self._engine: Any = self._deepspeed.initialize(
            model=scorer, model_parameters=groups, config=config, dist_init_required=False
        )[0]
        self._critic = Critic(self._engine, ranks, credit) if self.has_values else None

    @property
    def model(self) -> Any:
        """The Hugging Face model; under ZeRO 3 its parameters are partitioned."""
        return self._engine.module.model

    @property
    def max_positions(self) -> int | None:
        """Most tokens of a row that the policy has positions for; None where its configuration sets no limit."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def train_step(
        self, batches: Sequence[MicroBatch], signals: Signals, num_tokens: int, learning_rate: float, kl: float
    ) -> Trained:
        """One optimizer step on this rank's micro-batches of a global batch.

        Args:
            batches: as many on every rank; their `rows` and `turns` are places in the global batch.
            signals: of the global batch.
            num_tokens: action tokens of the global batch; the one divisor of the loss.
            learning_rate: of this step.
            kl: coefficient of the KL term.
        """
        for group, share in zip(self._engine.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = learning_rate * share
        batches = [batch.to(self._ranks.device) for batch in batches]
        if self._critic is not None:
            self._critic.judge(batches, signals, num_tokens)
        rows = self._row_signals(batches, signals, num_tokens)
        norm, sums = 0.0, torch.zeros(len(rows), len(COLUMNS), dtype=torch.float64, device=self._ranks.device)
        ratios = torch.zeros(len(signals.turn_advantages), 2, dtype=torch.float64, device=self._ranks.device)
        scale = self._ranks.size / max(num_tokens, 1)  # DeepSpeed averages over ranks; the loss is a sum over them
        for number, batch in enumerate(batches, 1):
            self._engine.set_gradient_accumulation_boundary(number == len(batches))
            loss, sums[batch.rows] = self._score(batch, rows, num_tokens, kl, ratios)
            self._engine.backward(loss * scale, scale_wrt_gas=False)
            norm = self._plain_norm()
            self._engine.step()
        summed = self._ranks.add(sums)  # each row is one rank's alone
        norm = float(self._engine.get_global_grad_norm() or norm)
        return Trained(summed.cpu().numpy(), norm, self._turn_metrics(signals, self._ranks.add(ratios)))

    def anchor(self, tensors: Mapping[str, Tensor]) -> None:
        """Make `tensors`, which are being published, the proximal policy."""
        if self._proximal is not None:
            self._proximal.model.load_state_dict(tensors)

    def probe(self, tensors: Mapping[str, Tensor]) -> Probe:
        """Logprobs at temperature 1 of fixed tokens, with the weights now, `tensors`: what an engine must agree with.

        They are computed in float32 whatever the weights' precision, so that only what an engine rounds remains; not
        under ZeRO 3, where no rank holds the weights.
        """
        vocabulary = int(self.model.config.vocab_size)
        token_ids = tuple((PROBE_STRIDE * i + 1) % vocabulary for i in range(PROBE_TOKENS))
        ids = torch.tensor([token_ids], device=self._ranks.device)
        exactly = in_float32(self._engine.module) if self._stage < 3 else nullcontext()
        with torch.no_grad(), exactly, put_in(self.model, tensors):
            logprobs = self._engine(ids, torch.ones_like(ids[:, 1:], dtype=torch.bool), 1.0)
        return Probe(token_ids=token_ids, logprobs=tuple(logprobs.tolist()))

    def tensors(self) -> Mapping[str, Tensor]:
        """The whole weights of the Hugging Face model."""
        if self._stage < 3:
            return self._merged(self.model.state_dict())
        with self._deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            return {name: x.detach().cpu().clone() for name, x in self._merged(self.model.state_dict()).items()}

    def write_adapters(self, into: Path) -> None:
        """Write the adapters, where there are some, to file `into` on rank 0."""
        if self._lora_scale is None:
            return
        own = [x for x in self.model.parameters() if x.requires_grad]
        with self._deepspeed.zero.GatheredParameters(own) if self._stage == 3 else nullcontext():
            if self._ranks.rank == 0:
                write_adapters(self.model.state_dict(), self._lora_scale, into)

    def _merged(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors if self._lora_scale is None else merged(tensors, self._lora_scale)

    def save(self, folder: Path) -> None:
        """Write DeepSpeed's state and this rank's random state into `folder`."""
        is_lora = self._lora_scale is not None
        self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=is_lora)
        torch.save(torch.get_rng_state(), _rng(folder, self._ranks.rank))
        self._ranks.barrier()

    def restore(self, folder: Path, world_size: int, had_values: bool = False) -> bool:
        """Take up what `save` wrote with `world_size` ranks, and with a value head if it `had_values`.

        Returns:
            False where a value head has come or gone: optimizer moments then start anew.
        """
        is_lora, alike = self._lora_scale is not None, had_values == self.has_values
        convert = alike and self._stage > 0 and world_size != self._ranks.size
        with universal(self._engine, self._ranks, folder, TAG) if convert else nullcontext(folder) as place:
            self._engine.load_checkpoint(
                str(place),
                tag=TAG,
                load_module_strict=alike and not is_lora,  # what is frozen is not in it
                load_optimizer_states=alike,
                load_lr_scheduler_states=False,
            )
        if (rng := _rng(folder, self._ranks.rank)).exists():
            torch.set_rng_state(torch.load(rng, weights_only=True))
        return alike

    def close(self) -> None:
        """Let go of DeepSpeed's hooks and buffers."""
        self._engine.destroy()

    def _score(
        self, batch: MicroBatch, rows: Tensor, num_tokens: int, kl: float, ratios: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss summed over the action tokens, and the sums [b, len(COLUMNS)] of the batch's rows.

        Adds to `ratios` [m, 2] each turn's tokens and importance ratios.
        """
        row_weights, success_weights, preferences = rows[batch.rows][batch.owners].unbind(1)
        if self._critic is not None:
            logprobs, value_loss = self._critic.score(batch)
            batch = replace(batch, advantages=self._critic.advantages[batch.turns])
        else:
            logprobs, value_loss = _scored(self._engine, batch), 0.0
        tokens = ActionTokens(
            logprobs,
            batch.behavior_logprobs,
            batch.advantages,
            batch.owners,
            len(batch.rows),
            ref_logprobs=self._reference_logprobs(batch),
            proximal_logprobs=_scored(self._proximal, batch),
            success_weights=success_weights,
            preferences=preferences,
        )
        weights = row_weights * AGGREGATIONS[self._options.aggregation](tokens, num_tokens, len(rows), self._longest)
        terms = evaluate(tokens, weights, self._options, kl)
        ratio = terms.importance_ratio.double()
        ratios.index_add_(0, batch.turns, torch.stack([torch.ones_like(ratio), ratio], 1))
        return terms.loss.sum() + value_loss, trajectory_sums(terms, tokens)

    def _turn_metrics(self, signals: Signals, ratios: Tensor) -> TurnMetrics:
        num_tokens, summed = ratios.cpu().numpy().T
        mean = summed / np.maximum(num_tokens, 1)
        if self._critic is None:
            return TurnMetrics(signals.turn_advantages, mean)
        return self._critic.metrics(mean)

    def _row_signals(self, batches: Sequence[MicroBatch], signals: Signals, num_tokens: int) -> Tensor:
        """Per row of the global batch, float32 [num_rows, 3]: weight, success weight, preference."""
        columns = [torch.from_numpy(x.astype(np.float32)) for x in (signals.row_weights, signals.success_weights)]
        device = self._ranks.device
        return torch.stack([*(x.to(device) for x in columns), self._preferences(batches, signals, num_tokens)], 1)

    def _preferences(self, batches: Sequence[MicroBatch], signals: Signals, num_tokens: int) -> Tensor:
        """What DPO multiplies each row's logprobs by, [num_rows]; zeros where it takes no part."""
        log_ratios = torch.zeros(len(signals.kept), device=self._ranks.device)
        if "dpo" not in self._options.names:
            return log_ratios
        for batch in batches:
            with torch.no_grad():
                moved = _scored(self._engine, batch) - self._reference_logprobs(batch)
            log_ratios[batch.rows] = torch.zeros(len(batch.rows), device=moved.device).index_add(0, batch.owners, moved)
        chosen, rejected = (torch.from_numpy(x).to(log_ratios.device) for x in (signals.chosen, signals.rejected))
        pull, _ = preferences(self._ranks.add(log_ratios), chosen, rejected, self._options.dpo_beta)
        return pull * num_tokens  # the loss is divided by the tokens, a mean over pairs must not be

    def _reference_logprobs(self, batch: MicroBatch) -> Any:
        """Logprobs [n] of the action tokens under the starting policy, if it is needed; under LoRA that is the base."""
        if self._lora_scale is None or not self._options.has_reference:
            return _scored(self._reference, batch)
        with switched_off(self.model), torch.no_grad():
            return _scored(self._engine, batch)

    def _plain_norm(self) -> float:
        """The gradient norm at the last micro-batch without ZeRO, where DeepSpeed clips but keeps no norm."""
        if self._stage or not self._engine.is_gradient_accumulation_boundary():
            return 0.0
        return float(nn.utils.get_total_norm([p.grad for p in self._engine.module.parameters() if p.grad is not None]))


def deepspeed_config(settings: Settings, parts: int, world_size: int) -> dict[str, Any]:
    """The JSON configuration of DeepSpeed: what Lagoon owns, and `learner.deepspeed` passed through.

    Batch sizes count micro-batches, whose rows vary: DeepSpeed uses them only to know when to step.
    """
    learner = settings.learner
    optimizer = {"lr": learner.learning_rate, "betas": [0.9, 0.95], "weight_decay": 0.0}
    optimizer |= {"torch_adam": True, "fused": True}  # DeepSpeed's own for CPUs would need a compiler, and minutes
    zero: dict[str, Any] = {"stage": learner.zero_stage}
    zero |= {"offload_optimizer": {"device": "cpu"}} if learner.offload_optimizer else {}
    owned: dict[str, Any] = {
        "train_batch_size": parts * world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": learner.max_grad_norm,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": zero,
        "bf16": {"enabled": learner.precision == "bf16"},
    }
    return {"steps_per_print": 1_000_000_000} | learner.deepspeed | owned


def _parameter_groups(scorer: Scorer, settings: Settings) -> tuple[list[dict[str, Any]], tuple[float, ...]]:
    """Parameters with a learning rate of their own, and each group's rate as a multiple of the policy's."""
    groups: list[dict[str, Any]] = [{"params": [x for x in scorer.model.parameters() if x.requires_grad]}]
    if not isinstance(scorer, ValueScorer):
        return groups, (1.0,)
    rate = settings.credit.value_learning_rate
    groups.append({"params": list(scorer.value_head.parameters()), "lr": rate})
    return groups, (1.0, rate / settings.learner.learning_rate)


def _deepspeed() -> Any:
    """The module, imported late: it takes seconds, and only learners need it."""
    import deepspeed  # noqa: PLC0415

    if not torch.cuda.is_available():
        # gloo does the CPU's collectives; the shared-memory op would need a compiler, and 30 s, at the first start
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def starting_policy(settings: Settings) -> Path:
    """The folder of the policy that version 1 is."""
    return Path(settings.policy.path) if settings.policy.path else settings.run.folder / "policy"


def _frozen(folder: Path, settings: Settings, device: torch.device) -> Scorer:
    """A policy that is only ever scored with."""
    model = load_policy(folder, _DTYPES[settings.learner.precision])
    return Scorer(model, settings.rollout.temperature).to(device).eval().requires_grad_(False)


def _scored(policy: Any, batch: MicroBatch) -> Any:
    """Logprobs [n] of the action tokens under a policy, if there is one."""
    if policy is None:
        return None
    return policy(batch.token_ids, batch.action_mask, position_ids=batch.position_ids)


def _rng(folder: Path, rank: int) -> Path:
    return folder / f"rng-{rank:05d}.pt"
