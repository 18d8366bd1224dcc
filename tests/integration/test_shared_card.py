"""A learner that shares its card with a vLLM server, as a process: it trains on its turn only, and then leaves."""

from pathlib import Path

import pytest

from infra.kafka import Follower
from infra.stack import health
from infra.turns import device_turn
from schemas.messages import UsageInterval
from schemas.settings import Kafka, Settings
from schemas.topics import USAGE
from tests.integration.test_hung_evaluator import until
from tests.integration.test_learner import begin, end, prepare, steps_done


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_learner_that_shares_its_card_trains_on_its_turn_and_leaves_when_the_version_is_published(
    tmp_path: Path, kafka: Kafka
) -> None:
    settings = _sharing(prepare(tmp_path, kafka, 1), tmp_path)
    servers = device_turn(settings)
    assert servers is not None
    assert servers.take()
    learner = begin(tmp_path)
    try:
        said = "waiting for the card: the vLLM server samples on it"
        until(lambda: said in health.at(_address(settings, learner.pid)).reason, "word of the card")
        assert steps_done(settings) == 0
        servers.release()
        until(lambda: steps_done(settings) == 1, "step")
        until(servers.take, "turn of the server")
        assert learner.poll() is None  # it has one more step to wait for
        learner.terminate()
    finally:
        end(learner, tmp_path)
    began, *later = _usage(settings)
    assert (began.busy_s, began.idle_s) == (0, 0)  # the card was the server's
    assert sum(interval.busy_s for interval in later) > 0


def _usage(settings: Settings) -> list[UsageInterval]:
    """What the learner has said of its use of the card."""
    follower = Follower(settings.kafka, USAGE.name, UsageInterval, "test")
    try:
        return sorted(follower.poll(), key=lambda interval: interval.started_at)
    finally:
        follower.close()


def _address(settings: Settings, pid: int) -> Path:
    (found,) = [*settings.run.folder.glob(f"services/learner-*-{pid}.json")] or [Path("none yet")]
    return found


def _sharing(settings: Settings, folder: Path) -> Settings:
    """`settings` in mode sync, with a card that is shared, and a step more than there are samples for."""
    values = settings.model_dump()
    values["loop"] |= {"mode": "sync", "max_staleness": 0}
    values["learner"] |= {"sync_interval_start": 1, "sync_interval": 1, "num_train_steps": 2}
    values["rollout"]["engine"], values["vllm"]["share_device"] = "vllm", True
    made = Settings.model_validate(values)
    made.save(folder / "settings.json")
    return made
