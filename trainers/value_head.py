"""A value head on the policy's trunk: what a row is expected to earn from a turn on, read where the turn begins."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainers.batches import MicroBatch
from trainers.policy import Scorer, packed_inputs


class ValueScorer(Scorer):
    """A Scorer with one linear layer on the last hidden state, 0 everywhere at first.

    It is no part of `model`, so no published policy has it: it lives in DeepSpeed's state alone.
    """

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0):
        super().__init__(model, temperature)
        self.value_head = nn.Linear(model.config.hidden_size, 1, dtype=model.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        token_ids: Tensor,
        mask: Tensor,
        temperature: float | None = None,
        position_ids: Tensor | None = None,
        states: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logprobs as a Scorer's; with `states` bool [b, t] also values float32 [k] after those tokens, row-major."""
        if states is None:
            return super().forward(token_ids, mask, temperature, position_ids)
        hidden, logits = self._both(packed_inputs(token_ids, position_ids), mask)
        targets = token_ids[:, 1:][mask].long()
        logprobs = -nn.functional.cross_entropy(logits.float() / self.temperature, targets, reduction="none")
        return logprobs, self.value_head(hidden[states]).squeeze(-1).float()

    def _both(self, inputs: dict[str, Any], mask: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden state [b, t, h], and logits [n, v] where the mask is."""
        if self.is_plain:
            hidden = self.model.get_decoder()(**inputs).last_hidden_state
            head = cast(nn.Module, self.model.get_output_embeddings())
            return hidden, head(hidden[:, :-1][mask])
        made = self.model(**inputs, output_hidden_states=True)
        return made.hidden_states[-1], made.logits[:, :-1][mask]


def states_of(batch: MicroBatch, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Where the values of a micro-batch are read, bool [b, t], and which states of the global batch these are, [k].

    One before each turn's first token and one after a row's last, in row-major order. `bounds` int64 [n + 1] are those
    of `Turns`: row i's turn k is state k + i, its end state bounds[i + 1] + i.
    """
    where = torch.zeros(batch.token_ids.shape, dtype=torch.bool, device=batch.token_ids.device)
    ids = torch.zeros_like(where, dtype=torch.int64)
    first = torch.ones_like(batch.turns, dtype=torch.bool)
    first[1:] = batch.turns[1:] != batch.turns[:-1]
    where[:, :-1][batch.action_mask] = first  # the token before the action's first one
    ids[:, :-1][batch.action_mask] = batch.turns + batch.rows[batch.owners]
    where.view(-1)[batch.ends], ids.view(-1)[batch.ends] = True, bounds[batch.rows + 1] + batch.rows
    return where, ids[where]
