"""Objectives: each a small pure function of logprobs; `OBJECTIVES` names them."""

from trainers.objectives.grpo import grpo
from trainers.objectives.terms import Objective, Terms

OBJECTIVES: dict[str, Objective] = {"grpo": grpo}

__all__ = ["OBJECTIVES", "Objective", "Terms"]
