"""What a learner does at its start, before anything is trained."""

from pathlib import Path
from typing import Any

import pytest

from infra.telemetry import Stop
from infra.weights import WeightStore
from schemas.errors import SettingsError
from schemas.settings import load
from tests.snapshots import Line
from trainers import learn
from trainers.checkpoint import Checkpoint, State
from trainers.stream import Cursor


class TwoRanks:
    """Rank 0 of two."""

    rank, size = 0, 2

    def share(self, value: Any) -> Any:
        return value


def test_several_ranks_that_would_share_a_card_are_refused_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ("--vllm.share_device=true", "--rollout.engine=vllm", f"--run.data_dir={tmp_path}")
    monkeypatch.setattr(learn, "Ranks", TwoRanks)
    with pytest.raises(SettingsError, match=r"2 ranks; with vllm\.share_device it has to be 1.*without a launcher"):
        learn.run(load(["infra/profiles/sync.toml"], shared), None, Stop())
    assert list(tmp_path.iterdir()) == []


def test_of_the_proximal_policies_that_starts_have_fetched_the_last_one_is_kept(tmp_path: Path) -> None:
    settings = load(overrides=[f"--run.data_dir={tmp_path / 'data'}", "--objective.name=ppo"])
    Line(tmp_path, WeightStore.of(settings)).publish(1, 2, 3)
    for version in (1, 2, 3):
        state = State(step=2 * version + 1, published_step=2 * version, weight_version=version)
        folder = learn.published(settings, Checkpoint(tmp_path, state, Cursor()))
        assert folder is not None
        assert [folder] == [*(settings.run.folder / "proximal").iterdir()]
        assert folder.name == f"v{version:08d}"
