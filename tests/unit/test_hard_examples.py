"""Hard examples come back: the real dispatcher, shards and stream, with agents whose skill is known."""

import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from flows.steps.dispatcher import Dispatcher, State
from infra.lake import Lake
from schemas.ids import shard_of
from schemas.messages import LearnerReport, Task, WeightSummary
from schemas.settings import Settings, load
from tests.experience import Sample, put
from tests.samples import NOON, clock, message, trajectory, weights
from tests.unit.curation import Curation
from trainers.credit import Turns
from trainers.signals import signals
from trainers.stream import ExperienceStream

SKILL = {"mastered": 1.0, "middling": 0.7, "hard": 0.3, "hopeless": 0.0}
GROUP, EXPLORATION = 8, 0.1
SETTINGS = Settings.model_validate(
    {
        "run": {"name": "r", "seed": 3},
        "loop": {"group_size": GROUP, "batch_size": 10 * GROUP, "max_staleness": 3},
        "dispatch": {"updates_ahead": 1, "exploration": EXPLORATION},
        "curate": {"hopeless_below": 0.15, "mastered_above": 0.85, "hard_below": 0.4},
        "families": [{"name": name, "num_tasks": 10, "held_out_ratio": 0.2} for name in SKILL],
    }
)


class Loop:
    """Rounds of ten groups: dealt, played, curated, and their difficulty told. A round is a weight version."""

    def __init__(self) -> None:
        self.skill, self.drawn = dict(SKILL), list[Task]()
        self._random = random.Random(0)
        self._dispatcher = Dispatcher(SETTINGS)
        self._shards: dict[int, Curation] = {}
        self._round = 0

    def run(self, rounds: int) -> Counter[str]:
        """How often each family was dealt in these rounds."""
        before = len(self.drawn)
        for _ in range(rounds):
            self._one()
        return Counter(task.family for task in self.drawn[before:])

    def restart(self) -> None:
        """All processes begin anew with their recovery state."""
        self._dispatcher = Dispatcher(SETTINGS, State.from_bytes(self._dispatcher.end_epoch()))
        for shard in self._shards.values():
            shard.restart()

    def hardness(self, family: str) -> list[tuple[float, bool]]:
        """Success and hardness as they were estimated for tasks of `family`, as `task_difficulty` has them."""
        rows = [row for shard in self._shards.values() for row in shard.rows["task_difficulty"]]
        return [(row["success_mean"], row["is_hard"]) for row in rows if row["task_family"] == family]

    def _one(self) -> None:
        self._round += 1
        version = WeightSummary(version=self._round, fingerprint="f", num_bytes=1, train_step=1, created_at=NOON)
        used_up = LearnerReport(
            at=NOON, weight_version=self._round, train_step=1, num_available=0, num_consumed=0, needs_per_step=40
        )
        self._dispatcher.hear(version)
        self._dispatcher.hear(used_up)
        self._dispatcher.tick(self._round * 1000)
        self._dispatcher.end_epoch()
        for task in self._dispatcher.send():
            self._play(task)

    def _play(self, task: Task) -> None:
        """Who does not succeed fails by a call of its own that went wrong."""
        shard = self._shards.setdefault(shard_of(task.task_id), Curation(SETTINGS, task.task_id))
        names = {"group_id": task.group_id, "task_id": task.task_id}
        failed = {"reward": 0.0, "status": "truncated", "stop_reason": "max_turns", "error_kind": "tool_error"}
        members = [
            trajectory(task.group_id, place, GROUP, self._round, **names, **({} if succeeds else failed))
            for place in range(GROUP)
            for succeeds in [self._random.random() < self.skill[task.family]]
        ]
        offset = 3 * len(self.drawn)
        shard.feed(weights(self._round, offset, self._round), message(members, offset + 1, self._round))
        shard.feed(clock(offset + 2, self._round))
        self._dispatcher.hear(shard.reports.pop())
        self.drawn.append(task)


@dataclass(frozen=True, slots=True)
class Story:
    """How often each family was dealt while skills stood still, and after hopeless tasks had become hard ones."""

    before: Counter[str]
    after: Counter[str]
    drawn: list[str]
    indexes: set[tuple[str, int]]
    hard: list[tuple[float, bool]]


@pytest.fixture(scope="module")
def story() -> Story:
    """15 rounds to get to know the tasks, 30; then what was hopeless can be solved: 15 rounds to find out, and 30."""
    loop = Loop()
    loop.run(15)
    before, hard = loop.run(30), loop.hardness("hard")
    loop.skill["hopeless"] = SKILL["hard"]
    loop.run(15)
    after = loop.run(30)
    return Story(
        before, after, [task.family for task in loop.drawn], {(task.family, task.index) for task in loop.drawn}, hard
    )


def test_failed_episodes_return_as_hard_tasks_and_what_teaches_nothing_rests(story: Story) -> None:
    # weights 2, 1 and 0.05; a tenth of the draws asks for no difficulty, and an estimate from few groups errs
    assert 1.3 < story.before["hard"] / story.before["middling"] < 2.1
    for family in ("mastered", "hopeless"):
        assert 0.025 < story.before[family] / story.before.total() < 0.15
        assert story.before[family] < story.before["middling"] / 2
    assert all(is_hard == (0.15 <= mean < 0.4) for mean, is_hard in story.hard)
    assert sum(is_hard for _, is_hard in story.hard) > len(story.hard) / 2


def test_hopeless_tasks_are_tried_now_and_then_and_return_as_hard_once_they_can_be_solved(story: Story) -> None:
    assert story.before["hopeless"] > 0
    assert story.after["hopeless"] > 2 * story.before["hopeless"]
    assert story.after["mastered"] < story.after["hopeless"] / 2


def test_no_family_starves(story: Story) -> None:
    for family in SKILL:  # four families, one draw in ten explores: at least once in forty draws
        drawn = [number for number, name in enumerate(story.drawn) if name == family]
        assert max(b - a for a, b in pairwise([-1, *drawn, len(story.drawn)])) <= len(SKILL) / EXPLORATION
    assert story.indexes == {(family, index) for family in SKILL for index in range(8)}  # 8 and 9 are held out


def test_difficulty_survives_a_restart_of_everything() -> None:
    whole, parts = Loop(), Loop()
    whole.run(15)
    for _ in range(3):
        parts.run(5)
        parts.restart()
    assert [task.task_id for task in parts.drawn] == [task.task_id for task in whole.drawn]


def test_a_failure_comes_with_the_sibling_that_was_right_as_a_contrast_pair(tmp_path: Path) -> None:
    """60 groups of 3 to 6 of which some are right and some wrong, in several commits and versions; batches of 16."""
    draw, lake = random.Random(0), Lake(str(tmp_path))
    lake.ensure()
    for number in range(6):
        put(lake, [one for place in range(10) for one in _mixed(f"{number}/{place}", draw)], number + 1)
    settings = load(overrides=["--loop.batch_size=16", "--loop.group_size=4", "--objective.name=dpo"])
    stream, paired = ExperienceStream(lake, settings), set[str]()
    stream.poll(2)
    while (batch := stream.take(2)) is not None:
        made = signals(batch.rows, batch.tokens, Turns.of(batch.rows, batch.tokens), settings)
        groups, rewards = (batch.rows[name].to_pylist() for name in ("group_id", "reward"))
        for right, wrong in zip(made.chosen.tolist(), made.rejected.tolist(), strict=True):
            assert groups[right] == groups[wrong]
            assert rewards[right] > rewards[wrong]
            paired.add(groups[right])
    assert len(paired) >= 50  # a batch's end may part a group's right from its wrong ones


def _mixed(name: str, draw: random.Random) -> list[Sample]:
    """A group whose quick members are a version newer than the slow ones."""
    size = draw.randint(3, 6)
    right = draw.randint(1, size - 1)
    rewards = [1.0] * right + [0.0] * (size - right)
    draw.shuffle(rewards)
    return [Sample(f"{name}-{i}", draw.randint(1, 2), r, right / size, 0.5, name) for i, r in enumerate(rewards)]
