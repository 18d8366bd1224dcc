"""Which turns of a closed group are worth branches, and the messages that ask for them."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pyarrow as pa

from flows.steps.member import Member
from flows.steps.purse import Purse
from schemas.ids import fork_id
from schemas.messages import MAX_PREFIX, Branch, Fork
from schemas.settings import Credit

MAX_TURNS, MAX_ATTEMPT = 1024, 1024
"""What a message can hold."""

Spans = Sequence[tuple[int, int]]
"""The actions of a trajectory's turns, [start, end) in tokens."""

_COLUMNS = ("token_ids", "behavior_logprobs", "turns")


class Candidate(NamedTuple):
    """A turn that could be forked, by what its siblings did at the same turn: a mean over all members but its own.

    `surprise` is the mean -logprob of their actions, in nats, an estimate of the policy's entropy there; `cost` are the
    tokens that they sampled from there on. The turn's own action has no part in it: if unlikely actions, which are
    often wrong, were those compared with branches, the comparison would depend on them, and the gradient be biased.
    """

    parent: int
    turn: int
    surprise: float
    cost: float


def choose(found: Sequence[Candidate], std: float, typical: float, left: float, num_branches: int) -> list[Candidate]:
    """Those of `found` that are forked, the most worth first, while their cost is within `left` tokens.

    A turn is worth std x surprise: where its group's outcomes differ, and where the policy was not sure. Unless all of
    the group's turns can be paid for, it has to be worth as much as the mean of all turns seen so far, `typical`, so
    that a budget is kept for those that matter.
    """
    chosen: list[Candidate] = []
    least = typical * (1 - 1e-9) if num_branches * sum(c.cost for c in found) > left else 0.0
    for candidate in sorted(found, key=lambda c: -c.surprise):
        worth, cost = std * candidate.surprise, num_branches * candidate.cost
        if worth > 0 and worth >= least and cost <= left:
            chosen.append(candidate)
            left -= cost
    return chosen


def candidates(members: Sequence[tuple[Spans, Sequence[float]]]) -> list[Candidate]:
    """The turns of a group that could be forked: those that a sibling reached too, after a prefix within bounds.

    `members` are the actions and behavior logprobs of each. One whose actions do not follow one another has no turns.
    """
    told = [_told(*member) if _is_sound(*member) else [] for member in members]
    totals: dict[int, tuple[float, float, float]] = defaultdict(lambda: (0.0, 0.0, 0.0))
    for figures in told:
        for turn, (surprise, cost) in enumerate(figures):
            count, surprises, costs = totals[turn]
            totals[turn] = (count + 1, surprises + surprise, costs + cost)
    found: list[Candidate] = []
    for parent, figures in enumerate(told):
        for turn, (surprise, cost) in enumerate(figures):
            count, surprises, costs = totals[turn]
            if count > 1 and members[parent][0][turn][0] <= MAX_PREFIX:
                others = count - 1
                found.append(Candidate(parent, turn, (surprises - surprise) / others, (costs - cost) / others))
    return found


def _is_sound(spans: Spans, logprobs: Sequence[float]) -> bool:
    edges = [0, *(edge for span in spans for edge in span)]
    return len(spans) <= MAX_TURNS and all(a < b for a, b in pairwise(edges)) and edges[-1] <= len(logprobs)


def _told(spans: Spans, logprobs: Sequence[float]) -> list[tuple[float, float]]:
    """By turn: the mean -logprob of its action, and the tokens sampled from it on."""
    costs = [*accumulate(end - start for start, end in reversed(spans))][::-1]
    return [(-sum(logprobs[a:b]) / (b - a), float(cost)) for (a, b), cost in zip(spans, costs, strict=True)]


def forks(
    rows: Sequence[tuple[Member, pa.RecordBatch]], std: float, purse: Purse, credit: Credit, most_bytes: int
) -> list[Fork]:
    """What is asked for when a group of deviation `std` closes, whose members and rows are `rows`; `purse` pays.

    A fork of more than `most_bytes` bytes is left out.
    """
    rows = [(member, row) for member, row in rows if member.attempt <= MAX_ATTEMPT]
    cells = [row.select(_COLUMNS).to_pylist()[0] for _, row in rows]
    spans = [[(turn["action_start"], turn["action_end"]) for turn in cell["turns"]] for cell in cells]
    found = candidates([(spans[i], cell["behavior_logprobs"]) for i, cell in enumerate(cells)])
    typical = purse.typical([std * one.surprise for one in found])
    wanted: list[Fork] = []
    for one in choose(found, std, typical, purse.left(credit.fork_budget), credit.fork_branches):
        fork = _fork(rows[one.parent][0], cells[one.parent], spans[one.parent][: one.turn + 1], credit.fork_branches)
        if len(fork.to_bytes()) <= most_bytes:
            purse.ask(fork.group_id, credit.fork_branches * one.cost)
            wanted.append(fork)
    return wanted


def turns_by_parent(wanted: Sequence[Fork]) -> dict[str, tuple[int, ...]]:
    """The forked turns of each parent, ascending."""
    found: dict[str, list[int]] = defaultdict(list)
    for fork in wanted:
        found[fork.branch.parent_id].append(fork.branch.turn)
    return {parent: tuple(sorted(turns)) for parent, turns in found.items()}


def _fork(member: Member, cell: dict[str, Any], spans: list[tuple[int, int]], num_branches: int) -> Fork:
    """What asks for branches of the last of the turns in `spans`."""
    start, end = spans[-1]
    branch = Branch(
        parent_id=member.trajectory_id,
        group_id=member.group_id,
        group_index=member.group_index,
        attempt=member.attempt,
        token_ids=tuple(cell["token_ids"][:start]),
        actions=tuple(spans[:-1]),
        action=tuple(cell["token_ids"][start : min(end, start + MAX_PREFIX)]),
    )
    return Fork(
        group_id=fork_id(member.trajectory_id, branch.turn),
        num_branches=num_branches,
        task_id=member.task_id,
        family=member.task_family,
        index=int(member.task_id.partition("/")[2]),
        branch=branch,
    )
