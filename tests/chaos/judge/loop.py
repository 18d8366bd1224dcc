"""Judge of a whole run with a learner: the log, the outboxes and the stored files against the lake."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from inference.outbox import Outbox
from infra import sql
from infra.lake import Lake
from infra.weights import WeightStore
from schemas.settings import Settings
from tests.chaos.judge.log import Produced, produced
from tests.chaos.judge.tables import Tables
from tests.chaos.verdict import Verdict


class Step(NamedTuple):
    """An optimizer step that no crash undid."""

    number: int
    incarnation: str
    weight_version: int
    published_version: int | None
    num_trajectories: int


def judge_loop(settings: Settings) -> Verdict:
    """Whether the run, stopped and drained, has lost, repeated or left unexplained anything."""
    tables, verdict = Tables(settings), Verdict()
    log, faults = produced(settings)
    for fault in faults:
        verdict.question(fault)
    _check_outboxes(settings.run.folder / "outbox", log, verdict)
    _check_outcomes(log, tables, verdict)
    steps = live_steps(tables)
    check_training(settings, {p.trajectory_id: p.min_weight_version for p in log}, steps, tables, verdict)
    _check_lineage(steps, Lake.of(settings), verdict)
    _check_versions(settings, steps, verdict)
    return verdict


def judge_learner(settings: Settings, versions: dict[str, int], steps: int) -> Verdict:
    """Whether a learner has taken `steps` steps on trajectories of these oldest `versions`, each explained."""
    tables, verdict = Tables(settings), Verdict()
    live = live_steps(tables)
    verdict.expect(len(live) == steps, f"{len(live)} steps count, expected {steps}")
    check_training(settings, versions, live, tables, verdict)
    _check_versions(settings, live, verdict)
    return verdict


def _check_outboxes(root: Path, log: list[Produced], verdict: Verdict) -> None:
    """What each outbox has counted ever is in the log."""
    counted, sent = Counter[str](), Counter(p.outbox for p in log)
    for folder in sorted(root.iterdir()) if root.exists() else []:
        outbox = Outbox(folder, 1 << 30)
        counted[outbox.id] += outbox.num_trajectories
        if not outbox.is_empty:
            verdict.lose(f"outbox {folder.name} was not drained; Kafka lacks some of its episodes")
        outbox.close()
    verdict.compare("trajectories of outbox", counted, sent)


def _check_outcomes(log: list[Produced], tables: Tables, verdict: Verdict) -> None:
    """Everything in the log has one outcome, under its own group and with all its tokens."""
    found = tables.outcomes()
    verdict.compare("outcome of trajectory", Counter(p.trajectory_id for p in log), Counter(row[0] for row in found))
    known = {(p.trajectory_id, p.group_id, p.tokens) for p in log}
    ids = {p.trajectory_id for p in log}
    for name, outcome, group, tokens in found:
        strange = name in ids and (name, group, tokens) not in known
        verdict.expect(not strange, f"{outcome} trajectory {name} has another group or other tokens than in the log")
    admitted = Counter(name for name, outcome, *_ in found if outcome == "admitted")
    verdict.compare("experience of trajectory", admitted, Counter(name for name, _ in tables.experience()))
    for group, times in Counter(tables.closings()).items():
        if times > 1:
            verdict.duplicate(f"group {group} was closed {times} times", times - 1)
    letters = sum(rows for rows, _ in tables.letters().values())
    verdict.expect(not letters, f"{letters} trajectories in dead letters, though no message was spoiled")
    verdict.expect(not tables.holes(), f"{tables.holes()} ranges of offsets expired unread")


def live_steps(tables: Tables) -> list[Step]:
    """Steps that count: a life that resumes from step s undoes the steps above s of the lives before it."""
    query = """select step, incarnation, weight_version, published_version, num_trajectories, incarnation_at,
        resumed_from_step from train_steps order by incarnation_at, step"""
    live: list[Step] = []
    life = None
    for *fields, _, resumed_from in tables.rows(query, "train_steps"):
        if fields[1] != life:
            life = fields[1]
            live = [step for step in live if step.number <= resumed_from]
        live.append(Step(*fields))
    return live


def check_training(
    settings: Settings, versions: dict[str, int], steps: list[Step], tables: Tables, verdict: Verdict
) -> None:
    """Each step is there once, with all its samples, which were admitted, and neither too old nor used too often.

    `versions` gives the oldest version of each trajectory, from outside the lake.
    """
    verdict.compare("step", Counter(range(1, len(steps) + 1)), Counter(s.number for s in steps))
    samples: dict[tuple[int, str], list[str]] = {}
    query = "select step, incarnation, trajectory_id from train_samples"
    for step, incarnation, name in tables.rows(query, "train_samples"):
        samples.setdefault((step, incarnation), []).append(name)
    admitted = {name for name, outcome, *_ in tables.outcomes() if outcome == "admitted"}
    uses: Counter[str] = Counter()
    for step in steps:
        trained = samples.get((step.number, step.incarnation), [])
        uses.update(trained)
        _check_step(step, trained, admitted, verdict)
        _check_staleness(step, trained, versions, settings.loop.max_staleness, verdict)
    for name, times in uses.items():
        if times > settings.learner.max_uses:
            over = times - settings.learner.max_uses
            verdict.duplicate(f"trained too often: trajectory {name} {times} times", over)


def _check_step(step: Step, trained: list[str], admitted: set[str], verdict: Verdict) -> None:
    if len(trained) != step.num_trajectories:
        verdict.question(f"step {step.number} has {len(trained)} samples, its row says {step.num_trajectories}")
    for name in trained:
        verdict.expect(name in admitted, f"step {step.number} trained on trajectory {name}, which was not admitted")


def _check_staleness(
    step: Step, trained: Iterable[str], versions: dict[str, int], bound: int, verdict: Verdict
) -> None:
    for name in trained:
        if name not in versions:
            verdict.question(f"step {step.number} trained on trajectory {name}, which no service has sent")
        elif (staleness := step.weight_version - versions[name]) > bound:
            verdict.question(
                f"trained above the staleness bound: step {step.number}, trajectory {name}: {staleness} versions old, "
                f"bound {bound}"
            )


def _check_lineage(steps: list[Step], lake: Lake, verdict: Verdict) -> None:
    """Lagoon's own views explain the same steps, and its books of work balance."""
    unexplained = "task_id is null or delta_version is null or learner_version is null"
    with sql.connect(lake) as connection:
        lineage = connection.sql(
            f"select step, count(*) filter ({unexplained}), count(*) from step_lineage group by step"
        ).fetchall()
        books = sql.rows(connection, "select * from conservation")
        work = sql.rows(connection, "select * from work")
    expected = Counter({s.number: s.num_trajectories for s in steps})
    verdict.compare("lineage of step", expected, Counter({step: count for step, _, count in lineage}))
    for step, missing, _ in lineage:
        verdict.expect(not missing, f"step {step}: {missing} samples without task or Delta version in step_lineage")
    for book in (*books, *work):
        verdict.expect(bool(book["balanced"]), f"books do not balance: {book}")
    for book in books:
        if book["in_flight"]:
            verdict.lose(f"{book['kind']} in flight after the drain: {book}", abs(book["in_flight"]))


def _check_versions(settings: Settings, steps: list[Step], verdict: Verdict) -> None:
    """Every version in the store is one whole file set made by the step that says so, and was checkpointed first."""
    store = WeightStore.of(settings)
    versions = store.versions()
    gapless = range(min(versions, default=1), max(versions, default=0) + 1)  # maintenance retires the oldest
    verdict.compare("weight version", Counter(gapless), Counter(versions))
    made = {s.published_version: s.number for s in steps if s.published_version}
    for version in versions:
        if version > 1:
            told = store.manifest(version).train_step
            verdict.expect(
                made.get(version) == told,
                f"weight version {version} says that step {told} made it; train_steps say {made.get(version)}",
            )
    saved = max(map(_version_of, (settings.run.folder / "checkpoints").glob("step-*-v*/MANIFEST.json")), default=0)
    verdict.expect(
        max(versions, default=0) <= saved,
        f"weight version {max(versions, default=0)} was published before its checkpoint: the newest made {saved}",
    )


def _version_of(manifest: Path) -> int:
    return int(json.loads(manifest.read_text())["state"]["weight_version"])
