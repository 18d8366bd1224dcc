"""Credit against branches: expected values worked by hand, and the whole of it for the one turn that decides."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from schemas.settings import Credit
from tests.experience import Sample, experience
from tests.road import TURNS
from tests.unit.test_branches import DECISIVE, branch_of, branches, parent_of
from trainers.batches import Tokens
from trainers.credit import BASELINES, Evidence, Turns
from trainers.credit.evidence import BRANCH_MEANS
from trainers.credit.group import STD_OFFSET

NUM_PARENTS = 8


def evidence_of(samples: list[Sample], means: list[list[float | None]], factor: float = 0.0) -> Evidence:
    rows = experience(samples).append_column(BRANCH_MEANS, pa.array(means, pa.list_(pa.float64())))
    return Evidence.of(rows, Turns.of(rows, Tokens.of(rows)), factor)


def sample(name: str, reward: float, *process: float) -> Sample:
    """One action token and one observation token a turn, after one token of prompt; mean 0.5, deviation 0.5."""
    count = len(process)
    return Sample(
        name,
        reward=reward,
        token_ids=[1] * (1 + 2 * count),
        action_mask=[False, *[True, False] * count],
        behavior_logprobs=[0.0] * (1 + 2 * count),
        turns=[(1 + 2 * k, 2 + 2 * k, r) for k, r in enumerate(process)],
    )


@pytest.mark.parametrize(
    ("baseline", "std", "forked", "others"),
    [("group", False, 0.75, 0.5), ("group", True, 0.75 / (0.5 + STD_OFFSET), 0.5 / (0.5 + STD_OFFSET)),
     ("leave_one_out", True, 0.75, 0.5 * 8 / 7)],
)  # fmt: skip
def test_a_forked_turn_is_its_outcome_less_its_branches_and_the_others_keep_their_baseline(
    baseline: str, std: bool, forked: float, others: float
) -> None:
    # outcome 1, branches 0.25 on average; mean 0.5 over 8 members, deviation 0.5
    evidence = evidence_of([sample("a", 1.0, 0.0, 0.0, 0.0), sample("b", 1.0, 0.0)], [[None, 0.25], []])
    options = Credit.model_validate({"baseline": baseline, "std": std})
    found = BASELINES[baseline](evidence, options)
    assert found.tolist() == pytest.approx([others, forked, others, others])


def test_process_rewards_to_come_are_added_to_a_forked_turn_too() -> None:
    # process rewards 0.2, 0.4, 0.6, their mean 0.4: -0.2, 0, 0.2; from turn 1 on, gamma 0.5: 0 + 0.5 x 0.2 = 0.1
    evidence = evidence_of([sample("a", 1.0, 0.2, 0.4, 0.6)], [[None, 0.25, None]], factor=1.0)
    found = BASELINES["group"](evidence, Credit(std=False, gamma=0.5))
    assert found[1] == pytest.approx(0.75 + 0.1)


def test_a_row_without_an_outcome_has_no_credit_from_branches() -> None:
    evidence = evidence_of([dataclasses.replace(sample("a", 1.0, 0.0), reward=None)], [[0.25]])
    assert BASELINES["group"](evidence, Credit()).tolist() == [0.0]


def test_the_turn_that_decides_gets_all_of_the_credit_and_by_its_group_alone_no_more_than_any_other() -> None:
    parents = [parent_of(index) for index in range(NUM_PARENTS)]
    rewards = [parent.reward or 0.0 for parent in parents]
    assert 0 < sum(rewards) < NUM_PARENTS
    samples = [
        Sample(
            parent.trajectory_id,
            reward=parent.reward,
            mean=float(np.mean(rewards)),
            std=float(np.std(rewards, ddof=1)),
            token_ids=parent.token_ids,
            action_mask=parent.action_mask,
            behavior_logprobs=parent.behavior_logprobs,
            turns=[(t.action_start, t.action_end, t.reward) for t in parent.turns],
        )
        for parent in parents
    ]
    means: list[list[float | None]] = [
        [float(np.mean([b.reward or 0.0 for b in branches(branch_of(p, turn))])) for turn in range(TURNS + 1)]
        for p in parents
    ]
    shares = {}
    for name, known in (("branches", means), ("none", [[] for _ in parents])):
        found = np.abs(BASELINES["group"](evidence_of(samples, known), Credit())).reshape(NUM_PARENTS, TURNS + 1)
        shares[name] = (found.sum(0) / found.sum()).round(12).tolist()
    assert shares["branches"] == [float(turn == DECISIVE) for turn in range(TURNS + 1)]
    assert shares["none"] == pytest.approx([1 / (TURNS + 1)] * (TURNS + 1))
