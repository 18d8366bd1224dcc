"""128 k tokens from a real service to the lake: split, claimed, killed in between, corrupted, repaired, replayed."""

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference.outbox import Outbox
from infra import sql
from infra.claims import Claims
from infra.cli.main import main
from infra.kafka import ensure_topics
from infra.lake import Lake
from schemas.ids import content_hash, partition_of
from schemas.names import Event, Header
from schemas.settings import Kafka, Settings
from schemas.topics import TRAJECTORIES
from schemas.trajectory import Trajectory, WeightVersionSpan
from schemas.wire import pack
from tests.integration.test_curate_kafka import Rollout, run_to_the_end, settings_for, table
from tests.rollout_process import INSTANCE, Service, received, until
from tests.samples import trajectory

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TOKENS = 131_072
KIB = 1024


def long_episode(group: str, index: int, size: int, num_tokens: int = NUM_TOKENS) -> Trajectory:
    """An episode of tokens and logprobs that do not compress; every second token is an action."""
    rng = random.Random(f"{group}/{index}")
    tokens = tuple(rng.choices(range(150_000), k=num_tokens))
    mask = tuple(i % 2 == 1 for i in range(num_tokens))
    logprobs = tuple(-rng.randrange(1, 4096) / 4096 if acts else 0.0 for acts in mask)  # exact in float32
    spans = (WeightVersionSpan(0, num_tokens, 1),)
    return trajectory(
        group,
        index,
        size,
        token_ids=tokens,
        action_mask=mask,
        behavior_logprobs=logprobs,
        weight_version_spans=spans,
        content_hash=content_hash("add/7", list(tokens), [(0, num_tokens, 1)]),
        num_prompt_tokens=1,
        num_generated_tokens=num_tokens // 2,
        reward=float(index % 2),
    )


def prepared(kafka: Kafka, tmp_path: Path, max_message_bytes: int) -> Settings:
    """Settings whose groups close when they are complete, however slow the machine is; topics, tables, version 1."""
    settings = settings_for(kafka.model_copy(update={"max_message_bytes": max_message_bytes}), tmp_path)
    patient = {
        "curate": settings.curate.model_copy(update={"group_timeout_s": 3600}),
        "dispatch": settings.dispatch.model_copy(update={"lease_s": 7200}),
    }
    settings = settings.model_copy(update=patient)
    settings.save(tmp_path / "settings.json")
    ensure_topics(settings.kafka, 30)
    Lake.of(settings).ensure()
    Rollout(settings.kafka).publish(1)
    return settings


def finish(settings: Settings, episodes: list[Trajectory]) -> Rollout:
    """Leave finished episodes in the service's outbox, as a service does that is killed before it packs them."""
    outbox = Outbox(settings.run.folder / "outbox" / INSTANCE, settings.rollout.outbox_bytes)
    for episode in episodes:
        outbox.append(episode)
    outbox.close()
    rollout = Rollout(settings.kafka)
    rollout.trajectories, rollout.tokens = outbox.num_trajectories, outbox.num_tokens
    return rollout


def books(settings: Settings) -> dict[str, dict[str, Any]]:
    with sql.connect(Lake.of(settings)) as connection:
        rows = connection.sql("SELECT * FROM conservation").to_arrow_table().to_pylist()
    return {row.pop("kind"): row for row in rows}


def payloads(lake: Lake) -> dict[str, tuple[Any, ...]]:
    columns = ("token_ids", "action_mask", "behavior_logprobs")
    return {row["trajectory_id"]: tuple(tuple(row[c]) for c in columns) for row in table(lake, "experience")}


def as_sent(episodes: list[Trajectory]) -> dict[str, tuple[Any, ...]]:
    return {e.trajectory_id: (e.token_ids, e.action_mask, e.behavior_logprobs) for e in episodes}


def sent_whole(settings: Settings, service: Service, num_messages: int) -> None:
    until(lambda: len(received(settings.kafka)) >= num_messages)
    assert service.stop() == 0


def replay(settings: Settings, tmp_path: Path, *arguments: str) -> int:
    return main(["replay", *arguments, "--config", str(tmp_path / "settings.json")])


def test_a_pack_above_the_limit_is_split_and_a_kill_between_its_halves_loses_and_repeats_nothing(
    tmp_path: Path, kafka: Kafka, start: Callable[..., Service]
) -> None:
    settings = prepared(kafka, tmp_path, 8 * 1024 * KIB)
    episodes = [long_episode("g", index, 16) for index in range(16)]  # 1.07 MB each: 7 + 7 + 2
    rollout = finish(settings, episodes)
    killed = start(settings, "outbox.after_pack=1")
    until(lambda: killed.has_ended)
    assert killed.process.returncode == -signal.SIGKILL
    sent_whole(settings, start(settings), 3)
    messages = received(settings.kafka)
    assert [(m.sequence, len(m.rows)) for m in messages] == [(1, 7), (2, 7), (3, 2)]
    assert [r.trajectory_id for m in messages for r in m.rows] == [e.trajectory_id for e in episodes]

    rollout.produced(Lake.of(settings))
    run_to_the_end(settings)
    assert payloads(Lake.of(settings)) == as_sent(episodes)
    for kind, amount in (("trajectories", 16), ("tokens", 16 * NUM_TOKENS)):
        found = books(settings)[kind]
        assert (found["produced"], found["admitted"], found["in_flight"]) == (amount, amount, 0)
        assert found["balanced"]
    assert not Path(settings.claims_uri).exists()


def test_a_trajectory_above_the_limit_is_claimed_through_a_kill_a_corruption_its_repair_and_replays(
    tmp_path: Path, kafka: Kafka, start: Callable[..., Service]
) -> None:
    settings = prepared(kafka, tmp_path, 256 * KIB)
    lake = Lake.of(settings)
    episodes = [*(long_episode("g", index, 4) for index in range(4)), *(long_episode("s", i, 4, 8) for i in range(4))]
    rollout = finish(settings, episodes)
    killed = start(settings, "outbox.after_claim=1")  # after the object is written, before the message is sent
    until(lambda: killed.has_ended)
    assert killed.process.returncode == -signal.SIGKILL
    folder = Path(settings.claims_uri)
    assert len(list(folder.iterdir())) == 1
    sent_whole(settings, start(settings), 5)  # four claims, and one pack
    objects = sorted(folder.iterdir())
    assert len(objects) == 4

    sound = objects[0].read_bytes()
    objects[0].write_bytes(sound[:-100] + bytes(100))
    rollout.produced(lake)
    run_to_the_end(settings)
    [letter] = [row for row in table(lake, "dead_letters") if row["kind"] == "undecodable"]
    assert "its SHA-256 differs" in letter["error"]
    assert (letter["num_rows"], letter["num_tokens"], len(letter["value"]) < 200) == (1, NUM_TOKENS, True)
    for kind, small, long in (("trajectories", 4, 1), ("tokens", 4 * 8, NUM_TOKENS)):  # its siblings wait for it
        found = books(settings)[kind]
        assert (found["admitted"], found["dead_lettered"], found["in_flight"]) == (small, long, 3 * long)
        assert found["balanced"]

    objects[0].write_bytes(sound)
    letters = ["dead-letters", "--where", "error like '%SHA-256%'"]
    assert replay(settings, tmp_path, *letters) == 0
    assert replay(settings, tmp_path, *letters) == 0  # before curate has read it: sent twice, counted once
    run_to_the_end(settings)
    assert payloads(lake) == as_sent(episodes)
    for kind, admitted in (("trajectories", 8), ("tokens", 4 * NUM_TOKENS + 4 * 8)):
        found = books(settings)[kind]
        assert (found["admitted"], found["dead_lettered"], found["in_flight"]) == (admitted, 0, 0)
        assert found["balanced"]
    assert replay(settings, tmp_path, *letters) == 2  # it is a letter no longer

    # another lake from the same log: the claims lie where they were, not beside it
    assert replay(settings, tmp_path, "trajectories", "--into", str(tmp_path / "two")) == 0
    again = Lake(str(tmp_path / "two"))
    assert payloads(again) == as_sent(episodes)
    assert not (tmp_path / "two" / "_lagoon" / "claims").exists()


def send_claim(settings: Settings, rollout: Rollout, episode: Trajectory) -> Path:
    """Send `episode` as a claim; returns its object."""
    body, headers = pack([episode])
    claim = Claims.of(settings).put(body)
    rollout.sequence += 1
    sequence = {Header.OUTBOX: b"o1", Header.SEQUENCE: str(rollout.sequence).encode()}
    rollout.producer.send(
        TRAJECTORIES.name,
        episode.group_id,
        claim.to_bytes(),
        headers=headers | sequence | claim.header,
        partition=partition_of(episode.task_id, settings.kafka.partitions),
    )
    rollout.producer.flush(20)
    return Path(settings.claims_uri, claim.sha256)


def test_an_open_group_whose_members_are_claims_closes_after_a_restart_without_what_is_gone(
    tmp_path: Path, kafka: Kafka
) -> None:
    settings = prepared(kafka, tmp_path, 256 * KIB)
    rollout, lake = Rollout(settings.kafka), Lake.of(settings)
    episodes = [long_episode("g", index, 4) for index in range(4)]
    objects = [send_claim(settings, rollout, episode) for episode in episodes[:3]]
    run_to_the_end(settings)
    assert table(lake, "experience") == []
    objects[1].unlink()
    send_claim(settings, rollout, episodes[3])
    run_to_the_end(settings)  # a new process's cache is empty: members 0 to 2 are read again by their offsets
    assert payloads(lake) == as_sent([episodes[0], *episodes[2:]])
    gone = [row["reason"] for row in table(lake, "ledger") if row["event"] == Event.INVALID]
    assert gone == ["its message, or the object it claims, was gone before its group closed"]
