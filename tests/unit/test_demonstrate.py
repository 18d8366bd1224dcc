"""Demonstrations: scripted, imperfect on purpose, never of a held-out question."""

import random
from pathlib import Path

import pyarrow as pa
import pytest

from inference.demonstrate import held_out, main, write
from inference.environments.calculator import options_of
from inference.environments.calculator_demos import Demonstration, demonstrate
from inference.environments.questions import KINDS
from inference.tokenizer import END, ChatTokenizer
from schemas.settings import Family, Policy, Settings
from schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory, from_batch

FAMILIES = tuple(Family(name=kind) for kind in KINDS)
SETTINGS = Settings(families=FAMILIES, policy=Policy(warm_start_steps=30, warm_start_batch=50))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shown")
    assert write(SETTINGS, folder) == 30 * 50
    return folder


def _rows(folder: Path) -> list[Trajectory]:
    with pa.ipc.open_file(str(folder / "demonstrations.arrow")) as reader:
        assert reader.schema.equals(TRAJECTORY_SCHEMA)
        return [row for i in range(reader.num_record_batches) for row in from_batch(reader.get_batch(i))]


def _play(kind: str, noise: float, **options: float) -> list[Demonstration]:
    rng = random.Random(0)
    checked = options_of(kind, options)
    return [demonstrate(checked, rng, noise=noise, max_turns=6, avoid=()) for _ in range(200)]


def test_each_row_is_encoded_as_an_episode_would_be(shown):
    tokenizer = ChatTokenizer.load(shown)
    for row in _rows(shown)[:200]:
        ids = tokenizer.prompt(row.messages[:1])
        starts = [len(ids)]
        for said, seen in zip(row.messages[1::2], [*row.messages[2::2], None], strict=True):
            ids += tokenizer.encode(said["content"] + END)
            ids += tokenizer.observation([seen]) if seen else []
            starts.append(len(ids))
        assert row.token_ids == tuple(ids)
        assert [t.action_start for t in row.turns] == starts[:-1]
        assert [t.observation_end for t in row.turns] == starts[1:]


def test_the_mask_covers_whole_actions_with_their_stop_token(shown):
    tokenizer = ChatTokenizer.load(shown)
    for row in _rows(shown)[:200]:
        said = [tokenizer.decode(row.token_ids[t.action_start : t.action_end]) for t in row.turns]
        assert said == [m["content"] + END for m in row.messages if m["role"] == "assistant"]
        assert [i for i, m in enumerate(row.action_mask) if m] == [
            i for t in row.turns for i in range(t.action_start, t.action_end)
        ]


def test_no_held_out_question_is_shown_and_all_families_are(shown):
    rows = _rows(shown)
    assert len(held_out(SETTINGS)) > 200  # 6 families of 40, few texts shared
    assert not held_out(SETTINGS) & {row.messages[0]["content"] for row in rows}
    assert {row.task_family for row in rows} == set(KINDS)


def test_the_same_seed_shows_the_same(shown, tmp_path):
    write(SETTINGS, tmp_path)
    assert [r.token_ids for r in _rows(tmp_path)] == [r.token_ids for r in _rows(shown)]
    assert (tmp_path / "tokenizer.json").read_text() == (shown / "tokenizer.json").read_text()


@pytest.mark.parametrize("kind", ["add", "muladd", "chain", "larger"])
def test_without_noise_it_is_always_right(kind):
    assert {d.reward for d in _play(kind, noise=0.0)} == {1.0}


def test_without_noise_it_fails_only_when_the_tool_does_to_the_end():
    wrong = [d for d in _play("flaky", noise=0.0) if not d.reward]
    assert all([seen for _, seen in d.turns[:5]] == ["error"] * 5 for d in wrong)
    assert len(wrong) < 15  # six failures in a row: 200 / 64 = 3 expected


def test_the_secret_is_never_guessed():
    assert {d.reward for d in _play("secret", noise=0.5)} == {0.0}


def test_noise_leaves_something_to_learn():
    rewards = [d.reward for d in _play("chain", noise=0.5)]
    assert 0.1 < sum(rewards) / len(rewards) < 0.6  # worked out: 3/4 * 5/6 * 5/6 * 1/2 = 0.26, a little luck beside


def test_no_episode_has_more_turns_than_allowed():
    assert max(len(d.turns) for d in _play("flaky", noise=0.0, fail_rate=0.95)) == 6


def test_families_of_other_environments_start_from_what_the_calculators_teach(tmp_path):
    settings = SETTINGS.model_copy(update={"policy": Policy(warm_start_steps=2, warm_start_batch=10)})
    other = Family(name="puzzles", environment="reasoning-gym", options={"dataset": "chain_sum"})
    mixed = settings.model_copy(update={"families": (other, *FAMILIES)})
    assert write(mixed, tmp_path) == 20
    assert {row.environment for row in _rows(tmp_path)} == {"calculator"}


def test_without_a_family_that_has_demonstrations_the_error_names_the_way_out(tmp_path, capsys):
    config = tmp_path / "run.toml"
    config.write_text('[[families]]\nname = "f"\nenvironment = "my.module:build"\n')
    assert main(["--out", str(tmp_path / "out"), "--config", str(config)]) == 2
    assert "set policy.path" in capsys.readouterr().err
