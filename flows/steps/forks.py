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

_COLUMNS = ("token_ids", "behavior_logprobs", "turns")


class Candidate(NamedTuple):
    """A turn that could be forked: `surprise` is the mean -logprob of its action, in nats; `cost` is of one branch.

    A branch is expected to sample as many tokens as its parent did from the turn on.
    """

    parent: int
    turn: int
    surprise: float
    cost: int


def choose(found: Sequence[Candidate], std: float, typical: float, left: float, num_branches: int) -> list[Candidate]:
    """Those of `found` that are forked, the most worth first, while their cost is within `left` tokens.

    A turn is worth std x surprise: where its group's outcomes differ, and where the policy was not sure. It has to be
    worth as much as the mean of all turns seen so far, `typical`, so that a budget is kept for those that matter.
    """
    chosen: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: -c.surprise):
        worth, cost = std * candidate.surprise, num_branches * candidate.cost
        if worth > 0 and worth >= typical * (1 - 1e-9) and cost <= left:
            chosen.append(candidate)
            left -= cost
    return chosen


def candidates(parent: int, spans: Sequence[tuple[int, int]], logprobs: Sequence[float]) -> list[Candidate]:
    """The turns of a trajectory whose actions are tokens `spans`; none where these do not follow one another."""
    edges = [0, *(edge for span in spans for edge in span)]
    if len(spans) > MAX_TURNS or any(b <= a for a, b in pairwise(edges)) or edges[-1] > len(logprobs):
        return []
    costs = [*accumulate(end - start for start, end in reversed(spans))][::-1]
    return [
        Candidate(parent, turn, -sum(logprobs[start:end]) / (end - start), costs[turn])
        for turn, (start, end) in enumerate(spans)
        if start <= MAX_PREFIX
    ]


def forks(
    rows: Sequence[tuple[Member, pa.RecordBatch]], std: float, purse: Purse, credit: Credit, most_bytes: int
) -> list[Fork]:
    """What is asked for when a group of deviation `std` closes, whose members and rows are `rows`; `purse` pays.

    A fork of more than `most_bytes` bytes is left out.
    """
    cells = [row.select(_COLUMNS).to_pylist()[0] if m.attempt <= MAX_ATTEMPT else None for m, row in rows]
    spans = [[(t["action_start"], t["action_end"]) for t in cell["turns"]] if cell else [] for cell in cells]
    found = [
        one
        for parent, cell in enumerate(cells)
        if cell
        for one in candidates(parent, spans[parent], cell["behavior_logprobs"])
    ]
    typical = purse.typical([std * one.surprise for one in found])
    wanted: list[Fork] = []
    for one in choose(found, std, typical, purse.left(credit.fork_budget), credit.fork_branches):
        member, cell = rows[one.parent][0], cells[one.parent]
        assert cell is not None  # noqa: S101 - it has a candidate
        fork = _fork(member, cell, spans[one.parent][: one.turn + 1], credit.fork_branches)
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
