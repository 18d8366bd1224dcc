"""One-shot: a tokenizer and scripted demonstrations, from which the tiny starting policy is warmed up.

    python -m inference.demonstrate --out DIR [--config FILE ...] [--section.key=value ...]

Writes `tokenizer.json`, `tokenizer_config.json` and `demonstrations.arrow` (an Arrow IPC file of trajectories of origin
`import`, in the order to train on). Numbers are fresh each time, and no held-out question ever comes up. Calculator
families alone have demonstrations; others beside them start from what those teach.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from tokenizers import Encoding, Tokenizer

from inference.environments.calculator import ERROR, TOOL, Options, options_of
from inference.environments.calculator_demos import Demonstration, demonstrate
from inference.environments.questions import question
from inference.tokenizer import END, START, make_tokenizer, save_tokenizer
from schemas.errors import LagoonError, SettingsError
from schemas.ids import content_hash, group_id, task_id, trajectory_id
from schemas.names import Origin, ResultStatus, Status, StopReason
from schemas.settings import Family, Settings, current, load
from schemas.trajectory import TRAJECTORY_SCHEMA, Reward, Trajectory, Turn, WeightVersionSpan, to_batch

CHUNK = 1024
"""Demonstrations that are encoded and written at once."""


def demonstrations(settings: Settings) -> Iterator[tuple[Family, Demonstration]]:
    """`policy.warm_start_steps` times `policy.warm_start_batch` episodes, each of a family drawn evenly.

    Raises:
        SettingsError: no family has demonstrations.
    """
    rng = random.Random(f"demonstrations/{settings.run.seed}")
    families = _demonstrated(settings)
    avoid = held_out(settings)
    for _ in range(settings.policy.warm_start_steps * settings.policy.warm_start_batch):
        family, options = rng.choice(families)
        yield (
            family,
            demonstrate(
                options,
                rng,
                noise=settings.policy.warm_start_noise,
                max_turns=settings.rollout.max_turns,
                avoid=avoid,
            ),
        )


def held_out(settings: Settings) -> frozenset[str]:
    """The texts of all held-out questions, of every calculator family: families may share questions."""
    return frozenset(
        question(options.kind, f.name, index, settings.run.seed).text
        for f, options in _demonstrated(settings)
        for index in range(f.num_train, f.num_tasks)
    )


def corpus(settings: Settings) -> Iterator[str]:
    """What the tokenizer's merges are learned from: each task's prompt, and a failed call."""
    for family, options in _demonstrated(settings):
        for index in range(family.num_tasks):
            text = question(options.kind, family.name, index, settings.run.seed).text
            yield _conversation(text, [("", ERROR)])


def to_trajectory(family: Family, number: int, shown: Demonstration, encoding: Encoding) -> Trajectory:
    """The demonstration as a trajectory: whole actions are unmasked, the stop token with them."""
    ids, turns = encoding.ids, _turns(shown, encoding)
    task = task_id(family.name, family.num_tasks + number)
    now = datetime.now(UTC)
    mask = [False] * len(ids)
    for turn in turns:
        mask[turn.action_start : turn.action_end] = [True] * (turn.action_end - turn.action_start)
    answered = bool(shown.turns) and "call>" not in shown.turns[-1][0]
    return Trajectory(
        trajectory_id=trajectory_id(),
        group_id=group_id("demonstrations", task, 0),
        group_index=0,
        group_size=1,
        task_id=task,
        task_family=family.name,
        environment=family.environment,
        origin=Origin.IMPORT,
        producer="demonstrate",
        content_hash=content_hash(task, ids, [(0, len(ids), 0)]),
        dispatch_weight_version=0,
        min_weight_version=0,
        max_weight_version=0,
        weight_version_spans=(WeightVersionSpan(0, len(ids), 0),),
        status=Status.COMPLETED if answered else Status.TRUNCATED,
        stop_reason=StopReason.ANSWER if answered else StopReason.MAX_TURNS,
        reward=shown.reward,
        rewards=(Reward("correct", shown.reward),),
        token_ids=tuple(ids),
        action_mask=tuple(mask),
        behavior_logprobs=(0.0,) * len(ids),
        turns=turns,
        messages=tuple(_messages(shown)),
        num_prompt_tokens=turns[0].action_start,
        num_generated_tokens=sum(mask),
        started_at=now,
        finished_at=now,
    )


def write(settings: Settings, folder: Path) -> int:
    """Write tokenizer and demonstrations to `folder`; returns the number of demonstrations."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(corpus(settings))
    save_tokenizer(tokenizer, folder)
    number = 0
    with pa.ipc.new_file(str(folder / "demonstrations.arrow"), TRAJECTORY_SCHEMA) as writer:
        for chunk in _chunks(demonstrations(settings)):
            encodings = _encode(tokenizer, [shown for _, shown in chunk])
            rows = [
                to_trajectory(family, number + i, shown, encoding)
                for i, ((family, shown), encoding) in enumerate(zip(chunk, encodings, strict=True))
            ]
            writer.write_batch(to_batch(rows))
            number += len(rows)
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m inference.demonstrate", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="TOML or JSON, left to right")
    known, rest = parser.parse_known_args(arguments)
    try:
        settings = load(known.config, rest) if known.config else current(overrides=rest)
        number = write(settings, known.out)
    except LagoonError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{number} demonstrations in {known.out}\n")
    return 0


def _demonstrated(settings: Settings) -> list[tuple[Family, Options]]:
    """The families that have demonstrations."""
    families = [(f, options_of(f.name, f.options)) for f in settings.families if f.environment == "calculator"]
    if not families:
        raise SettingsError(
            f"none of the families {[f.name for f in settings.families]} has environment calculator, which alone has "
            "scripted demonstrations; set policy.path to a policy that knows their environments"
        )
    return families


def _chunks(items: Iterator[tuple[Family, Demonstration]]) -> Iterator[list[tuple[Family, Demonstration]]]:
    chunk: list[tuple[Family, Demonstration]] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _conversation(text: str, turns: Sequence[tuple[str, str | None]]) -> str:
    """The episode as ChatML, ending with the last action, or ready for the next one."""
    parts = [f"{START}user\n{text}{END}\n"]
    for action, observation in turns:
        parts.append(f"{START}assistant\n{action}{END}")
        if observation is not None:
            parts.append(f"\n{START}tool\n{observation}{END}\n")
    return "".join(parts)


def _encode(tokenizer: Tokenizer, shown: Sequence[Demonstration]) -> list[Encoding]:
    texts = [_conversation(s.question.text, s.turns) for s in shown]
    return tokenizer.encode_batch(texts, add_special_tokens=False)


def _messages(shown: Demonstration) -> Iterator[dict[str, str]]:
    yield {"role": "user", "content": shown.question.text}
    for action, observation in shown.turns:
        yield {"role": "assistant", "content": action}
        if observation is not None:
            yield {"role": "tool", "content": observation}


def _turns(shown: Demonstration, encoding: Encoding) -> tuple[Turn, ...]:
    """Where each action stands: messages end with the stop token, and a line break and a header precede an action."""
    ends = [i for i, token in enumerate(encoding.tokens) if token == END]
    header = encoding.tokens.index(START, 1) - ends[0] + 3  # line break, <|im_start|>, assistant, line break
    starts = [end + header for end in ends]
    return tuple(
        _turn(starts[k - 1], ends[k] + 1, starts[k + 1] if k + 1 < len(ends) else ends[k] + 1, said)
        for k, said in zip(range(1, len(ends), 2), shown.turns, strict=True)
    )


def _turn(action_start: int, action_end: int, observation_end: int, said: tuple[str, str | None]) -> Turn:
    action, observation = said
    if "call>" not in action:
        return Turn(action_start, action_end, observation_end)
    unseen = ResultStatus.NONE if observation is None else ResultStatus.OK
    status = ResultStatus.ERROR if observation == ERROR else unseen
    arguments = action.removeprefix("<call>").removesuffix("</call>")
    return Turn(action_start, action_end, observation_end, TOOL, arguments, status)


if __name__ == "__main__":
    sys.exit(main())
