"""`lagoon explain TRAJECTORY`: one trajectory turn by turn, from the lake alone."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import duckdb

from infra import sql
from infra.cli import arguments
from infra.lake import Lake
from schemas.errors import LakeError
from schemas.ids import fork_id

SUMMARY = """\
Show one trajectory turn by turn: text, tool calls and results, rewards, the weight versions that sampled it; and for
each optimizer step that it was part of, advantages, values and importance ratios. The first characters of its id are
enough if no other id begins with them.
"""
WIDTH = 79
Row = dict[str, Any]

_SAMPLES = """
    SELECT t.*, s.weight_version, l.step IS NULL AS undone
    FROM train_samples t
    LEFT JOIN train_steps s ON s.step = t.step AND s.incarnation = t.incarnation
    LEFT JOIN live_steps l ON l.step = t.step AND l.incarnation = t.incarnation
    WHERE t.trajectory_id = ? ORDER BY t.step, s.finished_at
"""

_BRANCHES = """
    SELECT reward FROM ledger
    WHERE group_id = ? AND event IN ('admitted', 'stale', 'no_signal') ORDER BY trajectory_id
"""


def run(argv: Sequence[str]) -> int:
    """Print the trajectory."""
    parser = arguments.parser("explain", SUMMARY)
    parser.add_argument("trajectory", help="trajectory_id, or how it begins")
    args, overrides = arguments.parse(parser, argv)
    settings = arguments.settings_of(args.config, overrides)
    with sql.connect(Lake.of(settings)) as lake:
        for line in explain(lake, args.trajectory):
            print(line)
    return 0


def explain(lake: duckdb.DuckDBPyConnection, begins: str) -> Iterator[str]:
    """The lines, at most 79 wide.

    Raises:
        LakeError: no trajectory's id begins so, or several do.
    """
    name = _one(lake, begins)
    events = sql.rows(lake, 'SELECT * FROM ledger WHERE trajectory_id = ? ORDER BY "at"', name)
    found = sql.rows(lake, "SELECT * FROM experience WHERE trajectory_id = ?", name)
    samples = sql.rows(lake, _SAMPLES, name)
    yield f"trajectory {name}"
    yield from (line for row in (found or events)[:1] for line in _head(row))
    yield from (line for event in events for line in _event(event))
    yield from (line for sample in samples for line in _sample(sample))
    if not samples:
        yield "trained in no step"
    if not found:
        yield "its text is not in the lake: only admitted trajectories are"
        return
    branches = {turn: sql.rows(lake, _BRANCHES, fork_id(name, turn)) for turn in found[0]["forked_turns"] or ()}
    yield from _conversation(found[0], samples, branches)


def _one(lake: duckdb.DuckDBPyConnection, begins: str) -> str:
    query = """SELECT DISTINCT trajectory_id FROM (SELECT trajectory_id FROM ledger UNION ALL
        SELECT trajectory_id FROM experience) WHERE starts_with(trajectory_id, ?) ORDER BY 1 LIMIT 3"""
    names = [name for (name,) in lake.execute(query, [begins]).fetchall()]
    if begins in names:
        return begins
    if len(names) != 1:
        others = f"several trajectories, for example {names[0]} and {names[1]}" if names else "no trajectory"
        raise LakeError(f"{others} in the lake with an id that begins with {begins!r}; ledger has them (`lagoon sql`)")
    return names[0]


def _head(row: Row) -> Iterator[str]:
    yield from _field("task", f"{row['task_id']}, group {row['group_id']}, {row['origin']} by {row['producer']}")
    ended = f"{row['status']}, reward {_number(row['reward'])}"
    if "stop_reason" in row:
        ended += f", {row['stop_reason']}; its group: mean {_number(row['group_reward_mean'])}, "
        ended += f"deviation {_number(row['group_reward_std'])} of {row['group_num_rewards']}"
    yield from _field("ended", ended)
    yield from _field("tokens", f"{row.get('num_tokens', len(row.get('token_ids') or ()))}, "
                                f"{row['num_generated_tokens']} of them actions")  # fmt: skip
    if row.get("error") or row.get("error_kind"):
        yield from _field("error", f"{row['error_kind']}: {row.get('error') or ''}")


def _event(event: Row) -> Iterator[str]:
    lag = event["at_version"] - event["min_weight_version"]
    why = f": {event['reason']}" if event["reason"] else ""
    when = f"{event['at']:%Y-%m-%d %H:%M:%S}"
    yield from _field(event["event"], f"{when}, at version {event['at_version']}, staleness {lag}{why}")


def _sample(sample: Row) -> Iterator[str]:
    undone = ", undone by a restart" if sample["undone"] else ""
    text = (
        f"from version {sample['weight_version']}, staleness {sample['staleness']}, use {sample['use']}{undone}; "
        f"advantage {_number(sample['advantage'])}, weight {_number(sample['weight'])}, importance ratio "
        f"{_number(sample['importance_ratio_mean'])}, at most {_number(sample['importance_ratio_max'])}, "
        f"clipped {_number(sample['clip_ratio'])}"
    )
    yield from _field(f"step {sample['step']}", text)


def _conversation(row: Row, samples: list[Row], branches: dict[int, list[Row]]) -> Iterator[str]:
    """Prompt and turns. What the agent said are the last assistant messages, as many as it took turns."""
    messages, turns = json.loads(row["messages"] or "[]"), row["turns"] or []
    said = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
    said = said[max(len(said) - len(turns), 0) :]
    yield from ("", "prompt")
    yield from (line for m in messages[: said[0] if said else None] for line in _message(m))
    for number, turn in enumerate(turns):
        yield from ("", f"turn {number + 1}: tokens {turn['action_start']} to {turn['action_end'] - 1}, "
                        f"{_versions(row, turn)}, {_number(turn['latency_s'])} s")  # fmt: skip
        if number < len(said):
            end = said[number + 1] if number + 1 < len(said) else None
            yield from (line for m in messages[said[number] : end] for line in _message(m))
        if turn["tool"] or turn["result_status"] != "none":
            yield from _field("call", f"{turn['tool'] or 'no tool'} {turn['arguments'] or ''}")
            yield from _field("result", turn["result_status"])
        yield from _field("reward", f"{_number(turn['reward'])} of its own")
        if number in branches:
            yield from _field("branches", _outcomes(branches[number]))
        yield from (line for sample in samples for line in _learned(sample, number))


def _outcomes(branches: list[Row]) -> str:
    """What the branches of a turn came to."""
    rewards = [b["reward"] for b in branches if b["reward"] is not None]
    if not rewards:
        return f"asked for; {len(branches)} came, none with a reward"
    mean = _number(sum(rewards) / len(rewards))
    return f"mean {mean} of {len(rewards)}: {', '.join(map(_number, rewards))}"


def _learned(sample: Row, number: int) -> Iterator[str]:
    names = (("advantage", "turn_advantages"), ("value", "turn_values"), ("importance ratio", "turn_importance_ratios"))
    cells = [(word, sample[name][number]) for word, name in names if number < len(sample[name] or ())]
    if number < len(means := sample["turn_branch_means"] or ()) and means[number] is not None:
        cells.append(("against branches", means[number]))
    parts = [f"{word} {_number(value)}" for word, value in cells]
    yield from _field(f"step {sample['step']}", ", ".join(parts) or "nothing by turn was written down")


def _message(message: Row) -> Iterator[str]:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    yield from _field(str(message.get("role", "?")), text)


def _versions(row: Row, turn: Row) -> str:
    start, end = turn["action_start"], turn["action_end"]
    spans = row["weight_version_spans"] or ()
    found = sorted({s["version"] for s in spans if s["start"] < end and s["end"] > start})
    return f"version {', '.join(map(str, found)) or '?'}"


def _field(name: str, text: str) -> Iterator[str]:
    """`text` behind `name`, wrapped; control characters, which could steer the terminal, are shown as a box."""
    clean = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    lines = [part for line in clean.split("\n") for part in (textwrap.wrap(line, WIDTH - 14) or [""])]
    for number, line in enumerate(lines):
        yield f"  {name if not number else '':<11} {line}".rstrip()


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
