"""Going on with a run: from the newest state that is whole, with the old books closed."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.connectors.items import Raw
from flows.earlier import Earlier
from flows.steps.difficulty import Posterior
from flows.steps.dispatcher import Dispatcher
from flows.steps.eviction import LATE
from flows.steps.groups import MAX_CLOSED
from infra import sql
from infra.lake import Lake
from infra.resume import books
from infra.resume.choice import choose
from infra.resume.place import on_new_log, settled, with_policy
from infra.run_manifests import RunManifests
from infra.weights import WeightStore
from schemas.errors import LakeError, SettingsError, WeightStoreError
from schemas.ids import shard_of
from schemas.messages import Directive
from schemas.settings import Settings, load
from tests.manifests import flip, named, run_manifest, save_step
from tests.rows import AT, row
from tests.samples import clock, group, message, weights
from tests.unit.curation import SETTINGS as CURATION
from tests.unit.curation import Curation
from trainers.checkpoint import Checkpoint, CheckpointError, Checkpoints
from trainers.run_record import agreed


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = load(overrides=[f"--run.data_dir={tmp_path}", "--run.name=r", "--tracking.enabled=false"])
    Lake.of(made).ensure()
    return made


def fill(settings: Settings, table: str, *rows: dict[str, Any]) -> None:
    lake = Lake.of(settings)
    lake.append(table, [row(table, **r) for r in rows], f"test-{lake.version(table)}", 1)


def ask(settings: Settings, query: str) -> list[tuple[Any, ...]]:
    with sql.connect(Lake.of(settings)) as lake:
        return lake.sql(query).fetchall()


def newest(settings: Settings) -> Checkpoint | None:
    return Checkpoints(settings.checkpoints, 2, lambda: AT).newest()[0]


# which state


def test_the_newest_whole_state_is_chosen(settings: Settings) -> None:
    save_step(settings, 20)
    save_step(settings, 40)
    choice = choose(settings)
    assert (choice.manifest.train_step, choice.passed_over) == (40, ())


@pytest.mark.parametrize(
    ("place", "named_in"),
    [
        ("checkpoints/step-00000040-v00000002/cursor.json", "cursor.json"),
        ("checkpoints/step-00000040-v00000002/MANIFEST.json", "checkpoint"),
        ("weights/v00000002/model.safetensors", "model.safetensors"),
        ("weights/v00000002/MANIFEST.json", "weight version 2"),
        ("lake/_lagoon/run/00000002.json", "run manifest 2"),
    ],
)
def test_a_state_with_one_altered_byte_is_passed_over_by_name(settings: Settings, place: str, named_in: str) -> None:
    save_step(settings, 20)
    save_step(settings, 40)
    flip(settings.run.folder / place)
    choice = choose(settings)
    assert choice.manifest.train_step == 20
    assert len(choice.passed_over) == 1
    assert named_in in choice.passed_over[0]


def test_a_lake_older_than_the_manifest_is_not_gone_on_from(settings: Settings) -> None:
    saved = save_step(settings, 20)
    RunManifests(Lake.of(settings)).write(named(settings, saved, tables={"ledger": 7}))
    choice = choose(settings)
    assert choice.manifest.sequence == 1
    assert "table ledger is at version 0, the manifest saw 7" in choice.passed_over[0]


def test_without_a_whole_state_all_reasons_are_given(settings: Settings) -> None:
    with pytest.raises(LakeError, match="there is none"):
        choose(settings)
    saved = save_step(settings, 20)
    (saved.folder / "cursor.json").unlink()
    with pytest.raises(LakeError, match=r"(?s)step 20.*cursor\.json.*Restore what is missing"):
        choose(settings)


# the learner's own check at start


def test_the_learner_starts_from_what_the_manifest_names(settings: Settings) -> None:
    assert agreed(settings, None) is None
    saved = save_step(settings, 20)
    assert agreed(settings, newest(settings)) == saved


def test_a_checkpoint_older_than_the_manifest_is_refused(settings: Settings) -> None:
    save_step(settings, 20)
    saved = save_step(settings, 40)
    (saved.folder / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match=r"names checkpoint step-00000040-v00000002.*is step-00000020-v00000001"):
        agreed(settings, newest(settings))


def test_weights_other_than_the_manifest_names_are_refused(settings: Settings) -> None:
    save_step(settings, 20)
    flip(settings.run.folder / "weights" / "v00000001" / "MANIFEST.json")
    with pytest.raises(LakeError, match="weight version 1"):
        agreed(settings, newest(settings))


def test_a_checkpoint_newer_than_the_manifest_is_gone_on_from(settings: Settings) -> None:
    save_step(settings, 20)
    saved = save_step(settings, 40)
    (settings.run.folder / "lake" / "_lagoon" / "run" / "00000002.json").unlink()
    assert agreed(settings, newest(settings)) == saved


def test_versions_of_undone_steps_keep_their_numbers(settings: Settings) -> None:
    saved = save_step(settings, 20)
    undone = save_step(settings, 40)
    undone.folder.rename(undone.folder.with_name("undone"))
    digest = WeightStore.of(settings).digest(2)
    RunManifests(Lake.of(settings)).write(named(settings, saved, weight_version=2, weights_sha256=digest))
    found = agreed(settings, newest(settings))
    assert found is not None
    assert (found.state.step, found.state.weight_version) == (20, 2)  # the next one is 3


def test_without_such_a_manifest_a_store_that_is_ahead_is_refused(settings: Settings) -> None:
    save_step(settings, 20)
    undone = save_step(settings, 40)
    undone.folder.rename(undone.folder.with_name("undone"))
    (settings.run.folder / "lake" / "_lagoon" / "run" / "00000002.json").unlink()
    with pytest.raises(WeightStoreError, match="checkpoints come first"):
        agreed(settings, newest(settings))


def test_manifests_that_are_all_damaged_stop_the_learner(settings: Settings) -> None:
    save_step(settings, 20)
    flip(settings.run.folder / "lake" / "_lagoon" / "run" / "00000001.json")
    with pytest.raises(LakeError, match="none of the 1 run manifests"):
        agreed(settings, newest(settings))


# the books of the life that has ended


def produced(trajectories: int, tokens: int) -> dict[str, Any]:
    return {"outbox": "a", "produced_trajectories": trajectories, "produced_tokens": tokens}


def test_what_was_in_flight_is_named_as_lost_once(settings: Settings) -> None:
    # 10 produced, 7 with an outcome: 3 were in an outbox, a log or an open group
    fill(settings, "usage", produced(10, 100))
    outcomes = [{"event": "admitted", "offset": i, "num_tokens": 10, "topic": "trajectories"} for i in range(7)]
    fill(settings, "ledger", *outcomes)
    for _ in range(2):  # a resume that was cut short is begun again
        books.name_lost(Lake.of(settings), 1, 5)
    query = "select kind, produced, admitted, lost, in_flight, balanced from conservation"
    assert ask(settings, query) == [("trajectories", 10, 7, 3, 0, True), ("tokens", 100, 70, 30, 0, True)]
    [(error, headers)] = ask(settings, "select error, headers from dead_letters")
    assert error == "in flight when the run resumed without its log: 3 trajectories, 30 tokens"
    assert headers == '{"life": 1, "run_manifest": 5}'


def test_a_total_that_was_lost_with_the_log_is_made_up_for(settings: Settings) -> None:
    # the last total said 5; 7 have an outcome
    fill(settings, "usage", produced(5, 50))
    fill(settings, "ledger", *[{"event": "stale", "offset": i, "num_tokens": 10} for i in range(7)])
    assert ask(settings, "select balanced from conservation") == [(False,), (False,)]
    for _ in range(2):
        assert books.name_lost(Lake.of(settings), 1, 5) == (0, 0)
    query = "select kind, produced, stale, lost, in_flight, balanced from conservation"
    assert ask(settings, query) == [("trajectories", 7, 7, 0, 0, True), ("tokens", 70, 70, 0, 0, True)]


def test_offsets_of_a_new_log_are_not_taken_for_repeats(settings: Settings) -> None:
    fill(settings, "usage", produced(2, 20))
    places = [{"event": "admitted", "num_tokens": 10, "topic": topic} for topic in ("trajectories", "trajectories@1")]
    fill(settings, "ledger", *places)
    assert ask(settings, "select in_flight, balanced from conservation") == [(0, True), (0, True)]


def test_open_groups_are_abandoned_with_a_reason_and_closed_ones_are_not(settings: Settings) -> None:
    groups = ("open", "closed", "given up")
    fill(settings, "dispatches", *[{"group_id": g, "event": "opened", "attempt": 1} for g in groups])
    fill(settings, "dispatches", {"group_id": "given up", "event": "abandoned", "reason": "why"})
    fill(settings, "groups", {"group_id": "closed"})
    assert books.abandon_open(Lake.of(settings), 1) == 1
    assert books.abandon_open(Lake.of(settings), 1) == 0
    columns = "dispatched, closed, abandoned, open, balanced"
    assert ask(settings, f"select {columns} from work") == [(3, 1, 2, 0, True)]


def test_orders_in_force_are_told_again_but_no_pause(settings: Settings) -> None:
    bodies = [
        {"target": "dispatch", "family_weights": {"a": 0.5}},
        {"target": "learner", "learning_rate_scale": 0.5},
        {"target": "learner", "bucket_weights": [4.0, 1.0]},
        {"target": "dispatch", "family_weights": {"a": 0.25}},
        {"target": "dispatch", "pause": True},
    ]
    for number, body in enumerate(bodies):
        at = AT + timedelta(seconds=number)
        directive = {"directive_id": f"d{number}", "issued_by": "evaluator", "issued_at": at, **body}
        text = Directive.model_validate(directive).model_dump_json(exclude_none=True)
        fill(settings, "directives", {"directive_id": f"d{number}", "issued_at": at, "body": text})
    orders = {d.target: d for d in books.orders_in_force(Lake.of(settings))}
    assert set(orders) == {"dispatch", "learner"}
    assert orders["dispatch"].family_weights == {"a": 0.25}
    assert orders["dispatch"].pause is None
    assert (orders["learner"].learning_rate_scale, orders["learner"].bucket_weights) == (0.5, (4.0, 1.0))


# where the flows begin


def second_life(settings: Settings, **loop: Any) -> Settings:
    moved = on_new_log(settings, 1)
    changes: dict[str, Any] = {"loop": moved.loop.model_copy(update=loop)} if loop else {}
    return moved.model_copy(update=changes)


def test_difficulty_and_draws_come_back_from_the_lake(settings: Settings) -> None:
    estimate = {"task_id": "add/1", "beta": 2.0, "weight_version": 3}
    fill(settings, "task_difficulty", {**estimate, "alpha": 5.0, "num_groups": 1})
    fill(settings, "task_difficulty", {**estimate, "alpha": 7.0, "num_groups": 2, "at": AT + timedelta(seconds=1)})
    fill(settings, "dispatches", *[{"group_id": f"g{i}", "event": "opened"} for i in range(3)])
    fill(settings, "dispatches", {"group_id": "g0", "event": "reissued"})
    RunManifests(Lake.of(settings)).write(run_manifest(weight_version=9, train_step=8))
    earlier = Earlier(second_life(settings))
    known = {"add/1": Posterior(7.0, 2.0, 3, 2)}
    state = earlier.dispatcher()
    assert (state.posteriors, state.num_draws) == (known, 3)
    assert (state.weight_version, state.train_step) == (9, 8)
    assert earlier.shard(shard_of("add/1")).posteriors == known
    assert earlier.shard((shard_of("add/1") + 1) % 16).posteriors == {}
    assert earlier.shard(0).learner_version == 9


def test_a_first_life_begins_with_nothing(settings: Settings) -> None:
    fill(settings, "task_difficulty", {"task_id": "add/1", "alpha": 5.0, "beta": 2.0})
    assert Earlier(settings).dispatcher().posteriors == {}
    assert Earlier(settings).shard(shard_of("add/1")).posteriors == {}


def test_what_is_live_comes_back_and_expires_in_the_books(settings: Settings) -> None:
    names = ("live", "evicted", "ancient")
    versions = {"live": 9, "evicted": 9, "ancient": 0}
    rows = [
        {
            "trajectory_id": name,
            "task_id": "add/1",
            "min_weight_version": versions[name],
            "version_bucket": versions[name],
            "token_ids": [1, 2, 3],
        }
        for name in names
    ]
    fill(settings, "experience", *rows)
    fill(settings, "ledger", {"trajectory_id": "evicted", "event": "evicted"})
    RunManifests(Lake.of(settings)).write(run_manifest(weight_version=9))
    state = Earlier(second_life(settings)).shard(shard_of("add/1"))
    assert state.live.by_bucket() == {9: 1}
    [member] = state.live.expire(10)
    assert (member.trajectory_id, member.num_tokens) == ("live", 3)


def test_siblings_of_an_earlier_life_are_still_evicted_together(settings: Settings) -> None:
    # mean priorities: a 0.4, b 0.5; by rows the 0.1 of b would go first
    priorities = {"a": (0.3, 0.5), "b": (0.1, 0.9)}
    rows = [
        {"trajectory_id": f"{name}{i}", "group_id": name, "task_id": "add/1", "version_bucket": 9, "priority": p}
        for name, values in priorities.items()
        for i, p in enumerate(values)
    ]
    fill(settings, "experience", *rows)
    RunManifests(Lake.of(settings)).write(run_manifest(weight_version=9))
    live = Earlier(second_life(settings)).shard(shard_of("add/1")).live
    assert [member.trajectory_id for member, _ in live.evict(3, 1.0)] == ["a0", "a1"]


def two_lives(settings: Settings, *earlier: Raw) -> Curation:
    """A shard with room for a group, in the second life of a run that has seen `earlier` in its first."""
    curate = CURATION.curate.model_copy(update={"capacity": 64, "max_evicted_share": 1.0})
    first, second = (Curation(CURATION.model_copy(update={"curate": curate})) for _ in range(2))
    first.feed(*earlier)
    for table in ("experience", "ledger", "groups"):
        fill(settings, table, *first.rows[table])
    RunManifests(Lake.of(settings)).write(run_manifest(weight_version=1))
    second.curator.begin(Earlier(second_life(settings)).shard(second.shard))
    return second


def test_who_comes_after_a_resume_leaves_with_its_group_that_was_evicted_before(settings: Settings) -> None:
    a, b = group("a", [1.0, 1.0, 0.0, 0.0]), group("b", [0.0, 1.0, 1.0, 0.0])
    # a closes by timeout without its last member, and leaves for b, which tells more
    second = two_lives(settings, weights(1, 0), message(a[:3], 0), clock(0, at_s=6), message(b, 1, at_s=7))
    assert second.curator.state.live.by_bucket() == {1: 4}
    second.feed(message(a, 0, at_s=100))
    assert second.events("row") == [
        ("duplicate", 0),
        ("duplicate", 1),
        ("duplicate", 2),
        ("admitted", 3),
        ("evicted", 3),
    ]
    assert second.rows["ledger"][-1]["reason"] == LATE
    assert second.rows["experience"][0]["group_reward_mean"] == pytest.approx(2 / 3)  # of a as it had closed
    assert second.curator.state.live.by_bucket() == {1: 4}
    assert not second.curator.state.open


def test_who_comes_after_a_resume_joins_its_group_that_still_lives(settings: Settings) -> None:
    a = group("a", [1.0, 1.0, 0.0, 0.0])
    second = two_lives(settings, weights(1, 0), message(a[:3], 0), clock(0, at_s=6))
    second.feed(message(a[3:], 0, at_s=100))
    assert second.count() == {"admitted": 1}
    assert second.curator.state.live.by_bucket() == {1: 4}
    assert second.curator.state.closed[a[0].group_id].places == 0b1111


def test_a_new_life_remembers_no_more_closed_groups_than_a_shard_may(settings: Settings) -> None:
    names = [f"{number:04d}" for number in range(MAX_CLOSED + 2)]
    times = [AT + timedelta(seconds=number) for number in range(len(names))]
    closed = [{"group_id": n, "task_id": "add/1", "closed_at": t} for n, t in zip(names, times, strict=True)]
    fill(settings, "groups", *closed)
    fill(settings, "ledger", *[{"group_id": n, "event": "stale", "trajectory_id": f"{n:0>32}"} for n in names])
    assert list(Earlier(second_life(settings)).shard(shard_of("add/1")).closed) == names[2:]


def test_a_run_that_resumes_at_version_100_has_the_capacity_of_one_that_begins(settings: Settings) -> None:
    # (max_staleness 3 + 1) * batch 8 * 1 step a version = 32, not (3 + 100 + 1) * 8 = 832
    options = ["--loop.batch_size=8", "--loop.group_size=4", "--learner.sync_interval_start=1"]
    options += ["--dispatch.updates_ahead=1000"]
    families = {"families": [{"name": "add", "num_tasks": 1000}]}
    run = load(overrides=[f"--run.data_dir={settings.run.data_dir}", "--run.name=r", "--run.life=1", *options])
    run = Settings.model_validate(run.model_dump() | families)
    RunManifests(Lake.of(run)).write(run_manifest(weight_version=100))
    dispatcher = Dispatcher(run, Earlier(run).dispatcher())
    dispatcher.tick(1000)
    assert sum(lease.task.group_size for lease in dispatcher.state.leases.values()) == 32


def test_groups_of_a_new_life_have_ids_of_their_own(settings: Settings) -> None:
    families = {"families": [{"name": "add", "num_tasks": 1000}]}
    opened: list[set[str]] = []
    for life in (0, 1):
        run = Settings.model_validate(
            load(overrides=["--run.name=r", f"--run.life={life}"]).model_dump()
            | families
            | {"run": {"name": "r", "life": life}}
        )
        dispatcher = Dispatcher(run)
        dispatcher.state.weight_version = 1
        dispatcher.tick(1000)
        opened.append(set(dispatcher.state.leases))
    assert opened[0]
    assert not opened[0] & opened[1]


# the new place


def test_addresses_of_the_old_machine_are_not_taken_for_the_new_ones(tmp_path: Path) -> None:
    copied = [
        f"--run.data_dir={tmp_path}",
        "--run.name=r",
        "--kafka.brokers=127.0.0.1:1",
        "--tracking.uri=http://127.0.0.1:2",
    ]
    saved = load(overrides=copied)
    found = settled(saved, saved)
    assert found.kafka.brokers.startswith("127.0.0.1:")
    assert found.kafka.brokers != "127.0.0.1:1"
    assert found.tracking.uri != "http://127.0.0.1:2"
    assert settled(saved, load()).kafka.brokers == "127.0.0.1:1"  # given for this resume
    company = load(overrides=[*copied, "--kafka.brokers=kafka-1:9093"])
    assert settled(company, company).kafka.brokers == "kafka-1:9093"


def test_each_life_has_topics_of_its_own(settings: Settings) -> None:
    first = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"topic_prefix": "r."})})
    second = on_new_log(first, 1)
    assert (second.kafka.topic_prefix, second.run.life) == ("r.life1.", 1)
    assert on_new_log(second, 2).kafka.topic_prefix == "r.life2."


def test_the_starting_policy_comes_from_the_weight_store(settings: Settings) -> None:
    save_step(settings, 20)
    save_step(settings, 40)
    newest_state = choose(settings).manifest
    found = with_policy(settings, newest_state)
    assert (
        Path(found.policy.path, "model.safetensors").read_bytes()
        == (settings.run.folder / "weights" / "v00000001" / "model.safetensors").read_bytes()
    )


@pytest.mark.parametrize(("kl", "lora_rank", "is_needed"), [(0.1, 0, True), (0.0, 2, True), (0.0, 0, False)])
def test_a_later_version_is_no_starting_policy_for_who_builds_on_it(
    settings: Settings, kl: float, lora_rank: int, is_needed: bool
) -> None:
    save_step(settings, 20)
    save_step(settings, 40)
    newest_state = choose(settings).manifest
    WeightStore.of(settings).remove(1)
    changes = {"policy": {"path": "/gone"}, "objective": {"kl": kl}, "learner": {"lora_rank": lora_rank}}
    values = settings.model_dump()
    gone = Settings.model_validate(values | {name: values[name] | change for name, change in changes.items()})
    if is_needed:
        with pytest.raises(SettingsError, match="the objective refers to it, or adapters"):
            with_policy(gone, newest_state)
    else:
        assert Path(with_policy(gone, newest_state).policy.path).name == "v00000002"
