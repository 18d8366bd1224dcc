"""When to publish, what may be in the store, and that publishing twice is harmless."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.tracking import Tracking
from infra.weights import WeightStore
from schemas.errors import BrokerError, WeightStoreError
from schemas.messages import Probe, WeightSummary, decode
from schemas.settings import Learner, load
from tests.policies import write_policy
from trainers.checkpoint import ADAPTERS, POLICY, Checkpoint, Incarnation, State
from trainers.lora import adapt, merged, write_adapters
from trainers.policy import export, load_policy
from trainers.publish import Publisher, check_order, is_due, manifest, sync_interval
from trainers.stream import Cursor

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LIFE = Incarnation(name="a", resumed_from_step=0, started_at=NOW)
PROBE = Probe(token_ids=(1, 2), logprobs=(-1.0,))


class Topic:
    """Takes messages, or refuses them."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.away = False

    def send(self, topic: str, key: str, value: bytes, *, on_delivery: Callable[[BrokerError | None], None]) -> None:
        if not self.away:
            self.messages.append(value)
        on_delivery(BrokerError("away") if self.away else None)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return make(tmp_path, seed=0)


def make(tmp_path: Path, seed: int) -> Checkpoint:
    """A checkpoint at step 5 that makes version 1 visible."""
    folder = tmp_path / f"checkpoint-{seed}"
    write_policy(folder / POLICY, seed=seed, hidden=32, layers=1, mlp=32)
    state = State(step=5, weight_version=1, published_step=5, incarnations=(LIFE,))
    made = manifest(folder, state, 7, PROBE, NOW)
    return Checkpoint(folder, state.model_copy(update={"publication": made}), Cursor())


def following(before: Checkpoint, version: int) -> Checkpoint:
    """The checkpoint after `before`: three rows of the embeddings are others."""
    folder = before.folder.with_name(f"checkpoint-v{version}")
    shutil.copytree(before.policy, folder / POLICY)
    weights = load_file(folder / POLICY / "model.safetensors")
    weights["model.embed_tokens.weight"][:3] += version
    save_file(weights, folder / POLICY / "model.safetensors", {"format": "pt"})
    state = State(step=5 * version, weight_version=version, published_step=5 * version, incarnations=(LIFE,))
    made = manifest(folder, state, 7, PROBE, NOW)
    return Checkpoint(folder, state.model_copy(update={"publication": made}), Cursor())


class Adapting:
    """A learner of adapters in bfloat16: what it makes of a policy, step by step, as the learner does it."""

    def __init__(self, tmp_path: Path) -> None:
        self.root, self.start = tmp_path, write_policy(tmp_path / "start", hidden=256, mlp=512)
        self.model = load_policy(self.start, torch.bfloat16)
        adapt(self.model, Learner(lora_rank=2))

    def checkpoint(self, version: int) -> Checkpoint:
        """After a step of all adapters, but for the first; makes `version` visible."""
        generator = torch.Generator().manual_seed(version)
        for weight in self.model.parameters():
            if version > 1 and weight.requires_grad:
                weight.data += 0.01 * torch.randn(weight.shape, generator=generator)
        folder, tensors = self.root / f"adapted-{version}", self.model.state_dict()
        export(self.model, merged(tensors, 16.0), self.start, folder / POLICY)
        write_adapters(tensors, 16.0, folder / ADAPTERS)
        state = State(step=5 * version, weight_version=version, published_step=5 * version, incarnations=(LIFE,))
        made = manifest(folder, state, 7, PROBE, NOW)
        return Checkpoint(folder, state.model_copy(update={"publication": made}), Cursor())


def publisher(tmp_path: Path, topic: Topic) -> Publisher:
    tracking = Tracking(load(overrides=["--tracking.enabled=false"]), "test")
    return Publisher(WeightStore(str(tmp_path / "weights")), topic, tracking, tmp_path / "base")  # pyright: ignore[reportArgumentType]


def test_interval_anneals_from_frequent_to_sparse() -> None:
    # 5 at the start, 20 from step 200 on, half way between at 100: 12.5, rounded to even
    learner = Learner(sync_interval_start=5, sync_interval=20, sync_anneal_steps=200)
    assert [sync_interval(learner, step) for step in (0, 100, 200, 900)] == [5, 12, 20, 20]


def test_publication_is_due_at_the_interval_and_at_the_end() -> None:
    learner = Learner(sync_interval_start=3, sync_interval=3, num_train_steps=7)
    published, due = 0, []
    for step in range(1, 8):
        if is_due(learner, step, published):
            published = step
            due.append(step)
    assert due == [3, 6, 7]


def test_the_published_version_says_what_made_it(tmp_path: Path, checkpoint: Checkpoint) -> None:
    topic = Topic()
    publisher(tmp_path, topic).publish(checkpoint)
    stored = WeightStore(str(tmp_path / "weights")).manifest(1)
    assert (stored.train_step, stored.delta_version, stored.checkpoint) == (5, 7, checkpoint.folder.name)
    assert (stored.parent, stored.probe) == (None, PROBE)
    summary = decode(WeightSummary, topic.messages[0])
    assert (summary.version, summary.fingerprint) == (1, stored.fingerprint)
    assert summary.num_bytes == sum(f.num_bytes for f in stored.files)


def test_publishing_again_after_a_crash_only_tells_again(tmp_path: Path, checkpoint: Checkpoint) -> None:
    topic = Topic()
    for _ in range(2):
        publisher(tmp_path, topic).publish(checkpoint)
    assert WeightStore(str(tmp_path / "weights")).versions() == [1]
    assert len(topic.messages) == 2


def test_a_version_on_the_one_published_before_is_a_delta_and_is_told_as_one(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    topic = Topic()
    publishing, store = publisher(tmp_path, topic), WeightStore(str(tmp_path / "weights"))
    second = following(checkpoint, 2)
    third = following(second, 3)
    for saved in (checkpoint, second, third):
        publishing.publish(saved)
    publisher(tmp_path, topic).publish(third)  # a crash, and a new life: the same version, told again as it is stored
    assert [store.manifest(version).kind for version in store.versions()] == ["full", "delta", "delta"]
    told = [decode(WeightSummary, message) for message in topic.messages]
    assert [(m.version, m.kind, m.parent) for m in told] == [
        (1, "full", None),
        (2, "delta", 1),
        (3, "delta", 2),
        (3, "delta", 2),
    ]
    assert [m.num_bytes for m in told[1:]] == [store.manifest(version).num_bytes for version in (2, 3, 3)]


def test_without_the_weights_published_before_a_version_is_full(tmp_path: Path, checkpoint: Checkpoint) -> None:
    publishing, store = publisher(tmp_path, Topic()), WeightStore(str(tmp_path / "weights"))
    second = following(checkpoint, 2)
    third = following(second, 3)
    publishing.publish(checkpoint)
    shutil.rmtree(checkpoint.folder)
    publishing.publish(second)
    publisher(tmp_path, Topic()).publish(third)
    assert [store.manifest(version).kind for version in store.versions()] == ["full"] * 3


def test_a_learner_of_adapters_publishes_its_base_once_and_then_a_few_percent_of_the_bytes(tmp_path: Path) -> None:
    topic, learner = Topic(), Adapting(tmp_path)
    publishing, store = publisher(tmp_path, topic), WeightStore(str(tmp_path / "weights"))
    made = [learner.checkpoint(version) for version in range(1, 5)]
    for saved in made[:3]:
        publishing.publish(saved)
    shutil.rmtree(made[2].folder.with_name("base"))  # a new life, on another machine
    publisher(tmp_path, topic).publish(made[2])
    publisher(tmp_path, topic).publish(made[3])
    assert [store.manifest(version).kind for version in store.versions()] == ["full", *["adapters"] * 3]
    told = [decode(WeightSummary, message) for message in topic.messages]
    assert [(m.version, m.kind, m.parent) for m in told[1:3]] == [(2, "adapters", 1), (3, "adapters", 2)]
    # each layer has 4 x 65,536 + 3 x 131,072 weights, 4 x 1,024 + 3 x 1,536 in adapters: 1.3 %, and headers
    assert all(m.num_bytes <= 0.02 * told[0].num_bytes for m in told[1:])
    for version, saved in enumerate(made, 1):
        read = store.fetch(version, tmp_path / f"reader-{version}") / "model.safetensors"
        assert read.read_bytes() == (saved.policy / read.name).read_bytes()


def test_without_its_base_a_version_of_adapters_is_published_full(tmp_path: Path) -> None:
    learner = Adapting(tmp_path)
    publishing, store = publisher(tmp_path, Topic()), WeightStore(str(tmp_path / "weights"))
    for version in (1, 2):
        publishing.publish(learner.checkpoint(version))
    shutil.rmtree(tmp_path / "weights" / "v00000001")
    publishing.publish(learner.checkpoint(3))
    assert store.manifest(3).kind == "full"


def test_other_content_under_a_published_version_is_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    publisher(tmp_path, Topic()).publish(checkpoint)
    with pytest.raises(WeightStoreError, match="already published"):
        publisher(tmp_path, Topic()).publish(make(tmp_path, seed=1))


def test_news_that_kafka_did_not_take_is_told_later(tmp_path: Path, checkpoint: Checkpoint) -> None:
    topic = Topic()
    publishing = publisher(tmp_path, topic)
    topic.away = True
    publishing.publish(checkpoint)
    publishing.tell()
    assert topic.messages == []
    topic.away = False
    publishing.tell()
    publishing.tell()
    assert len(topic.messages) == 1


def test_a_store_ahead_of_the_checkpoints_is_refused(checkpoint: Checkpoint) -> None:
    check_order(None, 0)
    check_order(checkpoint.state, 0)  # a crash came between checkpoint and publication
    check_order(checkpoint.state, 1)
    with pytest.raises(WeightStoreError, match="version 2"):
        check_order(checkpoint.state, 2)
    with pytest.raises(WeightStoreError, match="checkpoints come first"):
        check_order(None, 1)


def test_a_store_that_lost_versions_is_refused() -> None:
    state = State(step=9, weight_version=3)  # without a publication of its own
    check_order(state, 3)
    with pytest.raises(WeightStoreError, match="versions are gone"):
        check_order(state, 2)
