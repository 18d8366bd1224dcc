"""Credit: how much better than expected each turn was. `BASELINES` names what a turn may be compared with."""

from collections.abc import Callable

from schemas.settings import Credit
from trainers.batches import Floats
from trainers.credit.counterfactual import with_branches
from trainers.credit.evidence import Evidence
from trainers.credit.group import GroupStatistics, group, group_advantages, group_statistics
from trainers.credit.leave_one_out import leave_one_out, leave_one_out_advantages
from trainers.credit.process import ProcessScale, process_weight
from trainers.credit.turn_group import turn_group
from trainers.credit.turns import Turns

BASELINES: dict[str, Callable[[Evidence, Credit], Floats]] = {
    "group": with_branches(group),
    "leave_one_out": with_branches(leave_one_out),
    "turn_group": with_branches(turn_group),
}
"""All but `value`, which needs what the value head says (see `trainers.credit.value`)."""

__all__ = [
    "BASELINES",
    "Evidence",
    "GroupStatistics",
    "ProcessScale",
    "Turns",
    "group_advantages",
    "group_statistics",
    "leave_one_out_advantages",
    "process_weight",
]
