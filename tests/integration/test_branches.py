"""Branches by the real service, dispatcher and curate flow on a real broker: they replay, and the books balance."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.tokenizer import ChatTokenizer
from infra import sql
from infra.fingerprints import fingerprint_file
from infra.kafka import Producer
from infra.lake import Lake
from infra.weights import WeightStore, describe
from schemas.ids import fork_id
from schemas.messages import Manifest, WeightSummary
from schemas.settings import ENVIRONMENT_FILE, Kafka, Settings
from schemas.topics import WEIGHTS
from tests.conftest import ROOT
from tests.road import TURNS
from tests.rollout_fakes import NOW
from tests.rollout_process import Service, prepare_rollouts, until

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(400)]

DECISIVE, NUM_BRANCHES, VERSION = 2, 3, 2
STOPS = 0.3
"""Probability that a token ends an action."""


def publish_babble(settings: Settings, policy: Path) -> None:
    """Weights of version 2: whatever was said, any token is as likely as another, and the stop token is likelier."""
    tensors = load_file(policy / "model.safetensors")
    for name, tensor in tensors.items():
        tensor.fill_(float("embed" in name or "norm" in name))  # layers add nothing: the last hidden state is all ones
    head = tensors["lm_head.weight"]
    odds = STOPS / (1 - STOPS) * (head.shape[0] - 1)
    head[ChatTokenizer.load(policy).end_id] = torch.log(torch.tensor(odds)) / head.shape[1]
    save_file(tensors, policy / "model.safetensors", {"format": "pt"})
    manifest = Manifest(
        version=VERSION,
        files=describe(policy),
        fingerprint=fingerprint_file(policy / "model.safetensors"),
        created_at=NOW,
    )
    WeightStore.of(settings).publish(policy, manifest)


def settings_for(folder: Path, kafka: Kafka) -> Settings:
    """Those of the services; a window of 40 trajectories, which nobody trains on."""
    plain = prepare_rollouts(folder, kafka)
    publish_babble(plain, folder / "policy")
    road = {
        "name": "road",
        "environment": "tests.road:build_babble",
        "num_tasks": 40,
        "options": {"decisive": DECISIVE},
    }
    sections = {
        "families": [road],
        "loop": {"group_size": 4, "batch_size": 16, "max_staleness": 3},
        "curate": {"epoch_s": 0.3, "group_timeout_s": 40},
        "dispatch": {"tick_s": 0.2},
        "credit": {"fork_budget": 2.0, "fork_branches": NUM_BRANCHES},
    }
    return Settings.model_validate(plain.model_dump() | sections)


@contextmanager
def flows_of(settings: Settings) -> Generator[None]:
    """Dispatcher, curate and records flow, each in its own process."""
    environment = os.environ | {ENVIRONMENT_FILE: str(settings.run.folder / "settings.json"), "PYTHONPATH": str(ROOT)}
    with open(settings.run.folder / "flows.log", "ab") as log:
        started = [
            subprocess.Popen([sys.executable, "-m", f"flows.{name}"], env=environment, stderr=log, stdout=log)
            for name in ("curate", "dispatch", "records")
        ]
    try:
        yield
        assert [process.poll() for process in started] == [None] * 3
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in started] == [0] * 3


def rows(settings: Settings, query: str) -> list[dict[str, Any]]:
    with sql.connect(Lake.of(settings)) as lake:
        return lake.sql(query).arrow().read_all().to_pylist()


def asked_for(settings: Settings) -> set[str]:
    """Groups of branches that a closed group has asked for."""
    parents = rows(settings, "SELECT trajectory_id, forked_turns FROM experience WHERE forked_turns IS NOT NULL")
    return {fork_id(row["trajectory_id"], turn) for row in parents for turn in row["forked_turns"]}


def is_all_in(settings: Settings) -> bool:
    """Whether the window is full of admitted trajectories, and nothing is under way any more.

    A group of branches is asked for before it is dispatched, so between the two nothing may be open: what is dispatched
    is read first, and what is asked for last.
    """
    dispatched = {row["group_id"] for row in rows(settings, "SELECT group_id FROM dispatches")}
    [work] = rows(settings, "SELECT * FROM work")
    admitted = rows(settings, "SELECT count(*) AS n FROM experience WHERE origin = 'rollout'")[0]["n"]
    in_flight = [row["in_flight"] for row in rows(settings, "SELECT * FROM conservation")]
    is_quiet = work["open"] == work["undispatched"] == 0 and in_flight == [0, 0]
    return admitted > 36 and is_quiet and asked_for(settings) <= dispatched


def test_branches_of_a_real_service_replay_their_parents_and_the_books_balance(
    tmp_path: Path, kafka: Kafka, start: Callable[..., Service]
) -> None:
    settings = settings_for(tmp_path, kafka)
    service = start(settings)
    summary = WeightSummary(version=VERSION, fingerprint="f", num_bytes=1, train_step=0, created_at=NOW)
    producer = Producer(kafka, "test")
    producer.send(WEIGHTS.name, str(VERSION), summary.to_bytes())
    producer.close()
    Lake.of(settings).ensure()
    with flows_of(settings):
        until(lambda: is_all_in(settings))
    assert service.stop() == 0

    assert all(row["balanced"] for row in rows(settings, "SELECT * FROM conservation"))
    [work] = rows(settings, "SELECT * FROM work")
    assert (work["balanced"], work["abandoned"], work["dispatched"]) == (True, 0, work["closed"])
    admitted = {row["trajectory_id"]: row for row in rows(settings, "SELECT * FROM experience")}
    parents = [row for row in admitted.values() if row["forked_turns"]]
    asked = {fork_id(p["trajectory_id"], turn): (p, turn) for p in parents for turn in p["forked_turns"]}
    branches = [row for row in admitted.values() if row["origin"] == "counterfactual"]
    assert len(branches) == NUM_BRANCHES * len(asked) > 0  # all have a reward, so all were replayed
    outcomes: dict[bool, set[bool]] = {True: set(), False: set()}
    for branch in branches:
        parent, turn = asked[branch["group_id"]]
        assert branch["parent_id"] == parent["trajectory_id"]
        before = parent["turns"][turn]["action_start"]
        assert branch["token_ids"][: branch["num_prompt_tokens"]] == parent["token_ids"][:before]
        assert len(branch["turns"]) == TURNS + 1 - turn
        outcomes[turn == DECISIVE].add(branch["reward"] == parent["reward"])
    assert outcomes == {True: {True, False}, False: {True}}  # what another turn did changes nothing
