"""The value head at work: values of a batch before its step, advantages from them, and the loss that teaches it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from schemas.settings import Credit
from trainers.batches import MicroBatch
from trainers.credit.value import clipped_value_loss, explained_variance, turn_states, value_advantages, whitened
from trainers.metrics import TurnMetrics
from trainers.ranks import Ranks
from trainers.signals import Signals
from trainers.value_head import states_of


class Critic:
    """Values and advantages of one global batch at a time. `engine` is DeepSpeed's, around a ValueScorer.

    `judge` and `metrics` are collective, and ranks score equally many micro-batches: ZeRO 3 gathers weights in each.
    """

    def __init__(self, engine: Any, ranks: Ranks, options: Credit):
        self._engine, self._ranks, self._options = engine, ranks, options
        self._loss = torch.zeros((), dtype=torch.float64, device=ranks.device)

    def judge(self, batches: Sequence[MicroBatch], signals: Signals, num_tokens: int) -> None:
        """Values of all states with the weights now, on every rank; from them the turns' advantages and targets.

        Args:
            batches: this rank's.
            signals: of the global batch, with evidence.
            num_tokens: what the policy's loss will be divided by; the value loss is a mean over turns.
        """
        if (evidence := signals.evidence) is None:
            raise RuntimeError("a value head was given no evidence to judge by")
        turns, device = evidence.turns, self._ranks.device
        self._bounds = torch.from_numpy(turns.bounds).to(device)
        found = torch.zeros(len(turns.starts) + len(evidence.outcomes), dtype=torch.float64, device=device)
        for batch in batches:
            where, ids = states_of(batch, self._bounds)
            with torch.no_grad():
                found[ids] = self._scored(batch, where)[1].double()
        values = self._ranks.add(found).cpu().numpy()  # each state is one rank's alone
        advantages, targets = value_advantages(evidence, values, self._options)
        places, kept = turn_states(evidence), signals.kept[turns.owners]
        self._values, self._targets, self._kept = values[places], targets, kept
        self._advantages = whitened(advantages, np.flatnonzero(kept)) if self._options.std else advantages
        self.advantages = torch.from_numpy(self._advantages.astype(np.float32)).to(device)
        weight = self._options.value_weight * num_tokens / max(int(kept.sum()), 1)
        self._states = self._by_state(values, places, targets, kept * weight)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Logprobs [n] of the action tokens, and the value loss to be added to a sum over action tokens."""
        where, ids = states_of(batch, self._bounds)
        logprobs, values = self._scored(batch, where)
        before, targets, weights = self._states[ids].unbind(1)
        loss = (weights * clipped_value_loss(values, before, targets, self._options.value_clip)).sum()
        self._loss = self._loss + loss.detach().double()
        return logprobs, loss

    def metrics(self, importance_ratios: NDArray[np.float64]) -> TurnMetrics:
        """What is written down of the batch."""
        total = float(self._ranks.add(self._loss))
        weight = float(self._states[:, 2].max()) if len(self._states) else 0.0
        kept = self._kept
        return TurnMetrics(
            self._advantages,
            importance_ratios,
            self._values,
            total / (weight * kept.sum()) if weight else 0.0,
            explained_variance(self._values[kept], self._targets[kept]),
        )

    def _scored(self, batch: MicroBatch, where: Tensor) -> tuple[Tensor, Tensor]:
        return self._engine(batch.token_ids, batch.action_mask, position_ids=batch.position_ids, states=where)

    def _by_state(
        self, values: NDArray[np.float64], places: NDArray[np.int64], targets: NDArray[np.float64], weights: Any
    ) -> Tensor:
        """Per state, float32 [m + n, 3]: value before the step, target, weight; a row's end has none."""
        table = np.zeros((len(values), 3), np.float32)
        table[:, 0] = values
        table[places, 1], table[places, 2] = targets, weights
        return torch.from_numpy(table).to(self._ranks.device)
