"""Section: how much each turn of a trajectory answers for its outcome."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.settings.base import Positive, Ratio, Seconds, Section


class Credit(Section):
    """Advantages by turn: what an outcome is compared with, rewards of turns, the value head (docs/credit.md)."""

    baseline: Literal["group", "leave_one_out", "turn_group", "value"] = "group"
    """What a turn is compared with: its closed group's mean, its siblings' mean, its siblings at the same turn, or what
    a value head expects."""
    std: bool = True
    """Divide by the group's deviation (`group`, `turn_group`) or the batch's (`value`); false: Dr. GRPO.
    `leave_one_out` never does."""
    gamma: Ratio = 0.99
    """Discount of a turn, not of a token."""
    lam: Ratio = 0.95
    """GAE's lambda, over turns."""
    process_weight: float = Field(default=0.1, ge=0)
    """Weight of the turns' own rewards in the first step, on the outcome's scale; 0: they do not count."""
    process_anneal_steps: Positive = 200
    """Steps in which that weight falls to 0, linearly."""
    value_learning_rate: float = Field(default=1e-3, gt=0)
    """Of the value head alone; follows the learner's warm-up and directives."""
    value_clip: float = Field(default=0.2, gt=0)
    """Farthest that a value may move in a step and still be pulled on."""
    value_weight: float = Field(default=0.5, gt=0)
    """Of the value loss beside the objective; it reaches the trunk that both share."""

    fork_budget: float = Field(default=0.0, ge=0, le=16)
    """Tokens that branches may sample for each token of ordinary episodes; 0: no turn is forked."""
    fork_branches: int = Field(default=4, ge=1, le=64)
    """Branches of a forked turn."""
    fork_wait_s: Seconds = 15
    """How long the learner keeps a group back whose branches are under way; after it the baseline alone counts."""

    @model_validator(mode="after")
    def _comparable(self) -> "Credit":
        if self.fork_budget and self.baseline == "value":
            raise ValueError(
                f"credit.fork_budget {self.fork_budget} with baseline value: branches replace the mean of a group, and "
                "GAE has none; set fork_budget = 0 or another baseline"
            )
        return self

    @property
    def reads_turns(self) -> bool:
        """Whether the learner needs what the lake says about turns beyond where their actions lie."""
        return self.process_weight > 0 or self.fork_budget > 0 or self.baseline in {"turn_group", "value"}
