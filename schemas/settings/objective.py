"""Section: what the learner minimizes."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.settings.base import Section

Name = Literal["grpo", "ppo", "cispo", "gspo", "reinforce", "dpo", "sft"]


class Objective(Section):
    """What the learner minimizes: one objective, what is mixed in, how tokens are averaged, KL to the reference."""

    name: Name = "grpo"
    mixture: dict[Name, float] = {}
    """Further objectives beside `name`, each by its weight: `mixture = { sft = 0.1 }`."""
    clip: float = Field(default=0.2, gt=0)
    """Distance below 1 at which an importance ratio is clipped. Usual: 0.2; cispo 1.0; gspo 3e-4."""
    clip_high: float | None = Field(default=None, gt=0)
    """The same above 1; None: as `clip`. Usual: 0.28 (DAPO); cispo 4.0; gspo 4e-4."""
    ratio_correction: Literal["truncate", "mask", "unbounded", "none"] = "truncate"
    """What bounds the ratio that multiplies the gradient of ppo (proximal / behavior) and reinforce."""
    ratio_cap: float = Field(default=2.0, gt=1)
    sequence_band: tuple[float, float] | None = None
    """Trajectories whose geometric mean ratio is outside count in the KL alone. Usual: 0.99 to 1.01."""
    negative_shift: float | None = Field(default=None, gt=0)
    """Failures that the policy has left by more than this, in mean log ratio, are not pushed further. Usual: 1e-4."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    mask_truncated: bool = False
    """Trajectories that were cut off for their length are not learned from, in the KL neither (DAPO's filter)."""
    kl: float = Field(default=0.1, ge=0)
    """Coefficient of the KL to the starting policy; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_target: float | None = Field(default=None, gt=0)
    """KL per token that the coefficient adapts to; None leaves it as it is."""
    dpo_beta: float = Field(default=0.1, gt=0)

    @property
    def upper_clip(self) -> float:
        """Distance above 1 at which a ratio is clipped."""
        return self.clip if self.clip_high is None else self.clip_high

    @property
    def names(self) -> set[str]:
        """All objectives that take part."""
        return {self.name, *self.mixture}

    @property
    def has_reference(self) -> bool:
        """Whether the starting policy is needed for as long as the run lasts."""
        return bool(self.kl) or "dpo" in self.names

    @model_validator(mode="after")
    def _checks(self) -> "Objective":
        if self.name in self.mixture:
            raise ValueError(f"objective.mixture repeats objective.name {self.name!r}, whose weight is 1")
        if self.kl and self.kl_estimator == "k1" and self.kl_in == "loss":
            raise ValueError(
                'objective.kl_estimator "k1" has a gradient of mean zero in the loss; set objective.kl_in = "reward", '
                'or take "k2" or "k3"'
            )
        if self.sequence_band is not None and not 0 < self.sequence_band[0] < self.sequence_band[1]:
            raise ValueError(f"objective.sequence_band {self.sequence_band} is not 0 < low < high")
        if self.kl_target is not None and not self.kl:
            raise ValueError("objective.kl_target needs a coefficient to start from; set objective.kl above 0")
        return self
