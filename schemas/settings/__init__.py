"""Settings: defaults here and nowhere else, then TOML files left to right, then `--section.key=value`.

Unknown keys are errors, bounds stand on the fields, and checks across fields name both values. Secrets come from the
environment (see `Kafka.secrets`), never from a file. The resolved settings are saved with the run.
"""

from schemas.settings.base import Section, is_secret
from schemas.settings.credit import Credit
from schemas.settings.data import Family, Kafka, Lake, Run, Tracking, Weights
from schemas.settings.load import ENVIRONMENT_FILE, current, load
from schemas.settings.loops import Curate, Dispatch, Evaluator, Learner, Loop, Policy, Rollout
from schemas.settings.objective import Objective
from schemas.settings.upkeep import Cost, Maintenance, Stack, Telemetry
from schemas.settings.vllm import Vllm
from schemas.settings.whole import Settings

__all__ = [
    "ENVIRONMENT_FILE",
    "Cost",
    "Credit",
    "Curate",
    "Dispatch",
    "Evaluator",
    "Family",
    "Kafka",
    "Lake",
    "Learner",
    "Loop",
    "Maintenance",
    "Objective",
    "Policy",
    "Rollout",
    "Run",
    "Section",
    "Settings",
    "Stack",
    "Telemetry",
    "Tracking",
    "Vllm",
    "Weights",
    "current",
    "is_secret",
    "load",
]
